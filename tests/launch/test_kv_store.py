"""Tests the store on which each process reads the last reports of the others."""

from pipejax.launch._diagnose import ProcessReport
from pipejax.launch._kv_store import KeyValueStore

from .helpers import Store


def test_new_report_replaces_the_last_of_its_rank():
    store = Store()
    first, second = KeyValueStore(store), KeyValueStore(store)
    first.post(ProcessReport(1, "host1", step=3))
    first.post(ProcessReport(1, "host1", step=4))
    second.post(ProcessReport(11, "host11", step=5))
    every = [ProcessReport(1, "host1", step=4), ProcessReport(11, "host11", step=5)]
    assert sorted(first.reports(), key=lambda report: report.rank) == every
    # The key of process 11 begins with that of process 1.
    assert second.reports(1) == every[:1]
    assert second.reports(2) == []


def test_diagnosis_is_read_by_all_and_is_no_report():
    store = Store()
    assert KeyValueStore(store).diagnosis() == ""
    KeyValueStore(store).publish(1, "process 0 is silent")
    assert KeyValueStore(store).diagnosis() == "process 0 is silent"
    assert KeyValueStore(store).reports() == []


def test_second_watchdog_does_not_hear_the_first():
    kept = Store()
    stores = [[KeyValueStore.opened(kept, rank) for rank in range(2)] for _ in range(2)]
    for store in stores[0]:
        store.post(ProcessReport(0, "host0", finished=True))
        store.publish(0, "it failed")
    assert [store.number for pair in stores for store in pair] == [0, 0, 1, 1]
    assert stores[1][0].reports() == []
    assert stores[1][1].diagnosis() == ""
