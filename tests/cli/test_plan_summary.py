"""Tests what `pipejax plan` says below its table."""

import math
import re

from pipejax.cli import main

from .helpers import plan


def test_plan_says_how_a_sharded_optimizer_hides_halves(capsys):
    """Half of an exchange takes 103.6 ms more than the forward pass.

    The first half takes 240.2 ms uncompressed, and the second 300.2 ms, with slopes.
    """
    given = ("--hosts", "4", "--bandwidth", "1gbit", "--device", "h100")
    assert plan(*given, "--shard-optimizer", parameters="10M", compute="500") == 0
    ways, summary, *_ = capsys.readouterr().out.split("\n\n")[1:]
    exposed = next(x for x in ways.splitlines() if "psum, uncompressed" in x)
    assert "603.6 ms   1.21 x compute " in exposed
    assert exposed.endswith("hides 436.9 ms of an exchange of 540.5 ms: wire")
    # In four bits, the first half takes 34.2 ms.
    assert "width 2, two_shot, int4 " in ways.splitlines()[0]
    assert "hides 333.9 ms of an exchange of 334.4 ms" in ways.splitlines()[0]
    alone = f"pipelining alone is at most {834.4 / 500.5:.2f} times as fast as a synchr"
    assert alone in summary
    assert f"two_shot, int4 is hidden from {167.2 / 166.7:.2f} times this" in summary
    assert f"uncompressed is hidden from {270.25 / 166.7:.2f} times this" in summary


def test_plan_says_where_local_steps_are_not_needed(capsys):
    given = ("--hosts", "4", "--bandwidth", "100gbit", "--local-steps")
    assert plan(*given, parameters="30M", compute="250") == 0
    assert "A pipeline hides it uncompressed, without lo" in capsys.readouterr().out


def test_plan_prints_the_batch_size_needed_to_hide_the_exchange(file, capsys):
    """The wire (24 MB), sums (12 MB) and 4 messages take 387.2 ms, compute 120 ms."""
    assert plan(file, "--batch", "32") == 0
    said = capsys.readouterr().out
    wire, sums = 2 * 3 / 4 * 16e6 / 62.5e6, 3 / 4 * 16e6 / 4e9
    times = (wire + sums + 4 * 5e-5) / 0.12
    assert (
        "The exchange of width 2, halving_doubling, uncompressed is hidden from"
        f" {times:.2f} times this batch size on, {math.ceil(32 * times)} examples a"
        " device." in said
    )
    plan(file)
    assert "times this batch size on.\n" in capsys.readouterr().out


def test_share_of_no_bytes_is_left_out(capsys):
    """An exchange that the backward pass alone hides needs no delayed bytes."""
    given = ("--hosts", "4", "--devices", "8", "--bandwidth", "1gbit", "--sharded")
    assert plan(*given, "--baseline", "bf16", parameters="10M", compute="50") == 0
    assert "are delayed" not in capsys.readouterr().out


def test_smallest_printed_batch_size_is_one_percent(capsys):
    given = ("--hosts", "4", "--bandwidth", "100gbit")
    assert plan(*given, parameters="10k", compute="1000") == 0
    assert "is hidden from 0.01 times this batch size on" in capsys.readouterr().out


def test_batch_of_a_sharded_update_agrees_with_the_row(capsys):
    """On 4 devices, an update of 200 ms takes 50 ms."""
    flags = ("--hosts", "4", "--bandwidth", "1gbit", "--device", "h100", "--one-core")
    flags = (*flags, "--parameters", "10M", "--compute-ms", "500", "--update-ms", "200")
    flags = (*flags, "--devices", "1", "--shard-optimizer", "--top", "100")
    assert main(["plan", *flags]) == 0
    said = capsys.readouterr().out
    (row,) = (x for x in said.splitlines() if re.match(r" *\d+  width 2, psum, unc", x))
    batch = float(re.search(r"psum, uncompressed is hidden from ([\d.]+) t", said)[1])
    # Whether it is hidden is one question.
    assert ("hidden behind compute" in row) == (batch <= 1)


def test_exchange_hidden_by_no_batch_is_named(capsys):
    flags = ("--hosts", "4", "--bandwidth", "100mbit", "--parameters", "300M")
    flags = (*flags, "--compute-ms", "250", "--update-ms", "250", "--batch", "32")
    assert main(["plan", *flags]) == 0
    assert "is hidden with no batch size, because the passes" in capsys.readouterr().out
