"""Tests what `pipejax plan` prints, draws, writes and refuses."""

import json
import math
import pathlib
import re
import shlex

import pytest

from pipejax import timing
from pipejax.cli import main

from .helpers import CLUSTER, GIVEN, plan, written


def test_plan_prints_the_best_way_first(file, capsys):
    assert plan(file, "--top", "3") == 0
    ways, summary, *_ = capsys.readouterr().out.split("\n\n")
    first, *others = ways.splitlines()
    assert first.startswith("  1  width 2, ")
    assert "int8" in first
    # D-Sync takes 120 ms and 387.2 ms; overlapped, it hides 80 ms of these.
    assert "120.0 ms   1.00 x compute  gain 4.23 (3.56)  hidden behind compute" in first
    assert "pipelining alone is at most 1." in summary
    *_, exact, d_sync = others
    assert len(others) == 2 + 2
    for row, says in ((exact, "width 2, "), (d_sync, "width 1, ")):
        assert re.match(rf" *\d+  {says}\w+, uncompressed  ", row)
    assert "  gain 1.00 (0.84)" in d_sync
    assert (
        f"Row {d_sync.split()[0]} is D-Sync in float32, and row {exact.split()[0]} is"
        " the best pipelined setup that is uncompressed." in summary
    )


def test_row_flag_prints_the_train_step_of_the_row(file, capsys):
    """`--row` prints its row too, even below the last one of `--top`."""
    plan(file, "--top", "40")
    ways = capsys.readouterr().out.split("\n\n")[0].splitlines()
    (row,) = (each for each in ways if "width 2, two_shot, int8 " in each)
    number = row.split()[0]
    assert plan(file, "--top", "1", "--row", number) == 0
    ways, summary, head, _ = capsys.readouterr().out.split("\n\n")
    assert row in ways.splitlines()
    assert f"With the exchange of row {number}, pipelining alone is at mo" in summary
    assert "The exchange of width 2, two_shot, int8 is hidden from " in summary
    assert head.startswith("# width 2, two_shot, int8, with your loss_fn")


def test_plan_without_a_file_prints_its_assumptions(capsys):
    """The assumptions are printed, and PowerSGD is among the candidates."""
    assert plan(*GIVEN, "--top", "999", parameters="300M", compute="250") == 0
    notes, ways, *_ = capsys.readouterr().out.split("\n\n")
    assert notes.splitlines() == [
        "This cluster is not calibrated. Assumed are 50 us a message, 100 us a"
        " collective, 8 GB/s inside a host.",
        "Codecs are assumed at half of the memory's 17 GB/s: one CPU core, by"
        " experiments/results/codec_speed.json.",
        "Shares of a link's bandwidth for devices that send and receive at once: 0.60"
        " (pair), 0.94 (shift), 0.72 (shuffle).",
        "Codecs with error feedback: int4, power_sgd.",
        "power_sgd is of rank 4, for a model of 1,024 x 1,024 matrices.",
    ]
    found = {line[5:69].strip() for line in ways.splitlines()}
    assert "width 2, psum, power_sgd" in found
    assert "width 2, two_shot, int4" in found
    assert "width 2, hierarchical, ring, fp8_e4m3" in found
    assert "width 2, hierarchical, two_shot, bf16" in found
    # PowerSGD encodes whole leaves, and these algorithms cut the leaves into pieces.
    assert not any("power_sgd" in way and "hierarchical" in way for way in found)
    assert "width 2, ring, power_sgd" not in found


def test_sharded_model_exchanges_its_shards_over_the_link_of_a_host(capsys):
    """Each of 8 devices exchanges an eighth, and has an eighth of the host's link."""
    given = ("--hosts", "4", "--bandwidth", "25gbit", "--devices", "8")
    given += ("--device", "h100")
    given += ("--sharded", "--top", "999")
    assert plan(*given, parameters="800M", compute="900") == 0
    out = capsys.readouterr().out
    assert (
        "The 8 devices of a host shard the model. In float32, each sends 8.4 GB" in out
    )
    assert "Between hosts, each exchanges its 400 MB of the gradients" in out
    assert 'mesh = pj.data_mesh(axis_name=("host", "fsdp"), hosts=4)' in out
    assert '    axis_name="host",' in out
    assert "hierarchical" not in out
    # A ring moves 6/4 of 400 MB at 391 MB/s, which is 1.536 s.
    ring = next(x for x in out.splitlines() if "width 2, ring, uncompressed" in x)
    assert "of an exchange of 153" in ring


def test_sharded_optimizer_is_planned_without_tree_and_buckets(capsys):
    """Half of an exchange of 12 s hides 0.3 s of forward and 0.6 s of backward pass."""
    given = ("--hosts", "4", "--bandwidth", "1gbit", "--shard-optimizer")
    assert plan(*given, "--top", "999", parameters="1G", compute="900") == 0
    out = capsys.readouterr().out
    assert "    shard_optimizer=True,\n" in out
    assert "width 2, two_shot, int8" in out
    assert "tree" not in out
    assert "buckets" not in out


def test_sharded_optimizer_on_one_core_adds_the_codec_to_compute(capsys):
    given = ("--hosts", "4", "--bandwidth", "1gbit", "--one-core", "--top", "999")
    rows = []
    for more in ((), ("--shard-optimizer",)):
        assert plan(*given, *more, parameters="10M", compute="500") == 0
        lines = capsys.readouterr().out.splitlines()
        rows.append(next(x[5:] for x in lines if "width 2, ring, int4 " in x))
    assert all("hidden behind compute that is " in row for row in rows)


def test_local_steps_are_planned_beside_the_usual_ways(capsys):
    """Eight devices of a host share 12.5 MB/s, over which each sends 1.5 x 15 MB."""
    given = ("--hosts", "4", "--devices", "8", "--bandwidth", "100mbit")
    given += ("--device", "h100", "--local-steps", "--top", "999")
    assert plan(*given, parameters="30M", compute="250") == 0
    out = capsys.readouterr().out
    steps = math.ceil(1.5 * 15e6 / (12.5e6 / 8) / 0.25)  # 57.6
    assert f"  H = {steps}, V = {steps}, ring, uncompressed  " in out
    assert f"  H = {4 * steps}, at once, ring, uncompressed  " in out
    d_sync = next(x for x in out.splitlines() if "width 1, psum, uncompressed" in x)
    assert " gain 1.00 " in d_sync
    assert "power_sgd  " not in out
    assert "all parameters once in 9 steps, beside 9 of these steps. The" in out
    assert '    axis_name="host",\n    sync_every=9,\n    overlap_steps=9,' in out


def test_sharded_flag_needs_several_devices(capsys):
    assert plan("--hosts", "4", "--bandwidth", "10gbit", "--sharded") == 2
    assert "`--sharded` must be used with several devices" in capsys.readouterr().err


def test_device_speed_is_taken_from_its_memory(capsys):
    plan(*GIVEN, "--device", "h100", parameters="300M", compute="250")
    notes, ways, *_ = capsys.readouterr().out.split("\n\n")
    assert "memory's 3352 GB/s: NVIDIA H100 80GB HBM3, as XLA knows it" in notes
    assert ways.startswith("  1  width 2, hierarchical, two_shot, int4  ")


def test_rows_of_codecs_without_measured_accuracy_say_so(capsys):
    """int4 has been trained with weight prediction, and fp8 has not."""
    given = ("--hosts", "4", "--bandwidth", "10gbit", "--top", "999")
    assert plan(*given, parameters="30M", compute="10") == 0
    ways, summary, *_ = capsys.readouterr().out.split("\n\n")[1:]
    said = {line[5:69].strip(): line for line in ways.splitlines()}
    assert said["width 2, two_shot, fp8_e4m3"].endswith("; accuracy not measured")
    for way in ("2, two_shot, int4", "1, two_shot, fp8_e4m3", "2, psum, uncompressed"):
        assert "not measured" not in said[f"width {way}"]
    assert "\nAccuracy not measured: this codec has not been compared" in summary


def test_note_on_accuracy_is_left_out_where_all_rows_are_measured(file, capsys):
    assert plan(file, compute="100000") == 0
    assert "ccuracy not measured" not in capsys.readouterr().out


def test_gains_over_bfloat16_gradients_are_smaller(file, capsys):
    """The exchange of D-Sync takes half of 387 ms, so its step takes 313.7 ms."""
    assert plan(file, "--baseline", "bf16", "--top", "1") == 0
    ways, summary, *_ = capsys.readouterr().out.split("\n\n")
    assert "120.0 ms   1.00 x compute  gain 2.61 (" in ways.splitlines()[0]
    assert "D-Sync, which exchanges bf16 gradients after compute" in summary


def test_out_flag_writes_the_whole_plan(file, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert plan(file, "--out", str(out)) == 0
    record = json.loads(out.read_text())
    assert timing.from_json(record["cluster"]) == CLUSTER
    assert (record["elements"], record["compute"]) == (4_000_000, 0.12)
    assert capsys.readouterr().out.endswith(record["python"] + "\n")
    steps = [way["step"] for way in record["ways"]]
    assert len(steps) == 4 * 11
    assert steps[0] == 0.12
    first = record["ways"][0]
    assert (first["width"], first["codec"], first["buckets"]) == (2, "int8", 1)
    assert first["exchange"].keys() == set(timing.Duration._fields)
    assert first["gains"]["synchronous"] == pytest.approx(0.5072 / 0.12)


def test_plot_flag_writes_a_picture(file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "scaling.png"
    assert plan(file, "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "width 1" in capsys.readouterr().out


def test_codecs_cost_compute_with_one_core(file, capsys):
    plan(file, "--top", "1")
    apart = capsys.readouterr().out
    plan(file, "--top", "1", "--one-core")
    assert capsys.readouterr().out != apart


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parameters": "0"}, "pipejax: `--parameters` must be a whole number above 0"),
        ({"compute": "-1"}, "pipejax: `--compute-ms` must be at least 1e-06, got -1.0"),
        ({"compute": "nan"}, "pipejax: `--compute-ms` must be at least 1e-06, got nan"),
    ],
)
def test_bad_numbers_of_plan_are_refused(file, capsys, change, says):
    assert plan(file, **change) == 2
    assert capsys.readouterr().err.startswith(says)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "`--hosts` and `--bandwidth` must be given where there is no file"),
        (["--hosts", "4"], "`--bandwidth` must be given where there is no file"),
        (["c.json", "--hosts", "4"], "`--hosts` must be left out beside a file"),
        (["--hosts", "0", "--bandwidth", "1gbit"], "`--hosts` must be at least 1"),
        ([*GIVEN, "--devices", "0"], "`--devices` must be at least 1, got 0"),
        (["--hosts", "4", "--bandwidth", "10"], "`--bandwidth` must be a number above"),
        (
            [*GIVEN, "--latency-us", "-1"],
            "`--latency-us` must be at least 0, got -1.0",
        ),
        ([*GIVEN, "--batch", "0"], "`--batch` must be at least 1, got 0"),
        ([*GIVEN, "--top", "0"], "`--top` must be at least 1, got 0"),
        ([*GIVEN, "--row", "0"], "`--row` must be one of the rows 1 to "),
        (
            [*GIVEN, "--shard-optimizer", "--local-steps"],
            "`--shard-optimizer` must be left out with `--local-steps`",
        ),
    ],
)
def test_bad_flags_of_plan_are_refused(flags, says, capsys):
    assert plan(*flags) == 2
    assert capsys.readouterr().err.startswith(f"pipejax: {says}")


def test_calibrated_codec_of_unknown_name_is_refused(tmp_path, capsys):
    cluster = timing.as_json(CLUSTER)
    cluster["codecs"] = {"int9": cluster["codecs"]["int8"]}
    path = written(tmp_path, cluster=cluster)
    assert plan(path) == 2
    said = f"pipejax: {path}: `cluster.codecs` must have names from bf16, truncate, "
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert "; got ['int9']. Leave out other codecs." in error


def in_fences(page, language):
    text = (pathlib.Path(__file__).parents[2] / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_output_of_plan_equals_the_document(capsys):
    (plan, *_) = in_fences("choose.md", "text")
    command = in_fences("choose.md", "bash")[0]
    assert command.startswith("pipejax plan")
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == plan


def test_calibration_file_of_the_document_is_read(tmp_path, capsys):
    (text,) = in_fences("reference/files.md", "json")
    path = tmp_path / "cluster.json"
    path.write_text(text)
    assert plan(str(path), parameters="2M") == 0
    assert capsys.readouterr().out.startswith("  1  width ")
    cluster = timing.from_json(json.loads(text)["cluster"])
    assert timing.as_json(cluster) == json.loads(text)["cluster"]


def test_update_is_a_part_of_the_compute_and_predicted_once_more(capsys):
    """20 ms with an update of 5 ms: a predicted step takes 25 ms."""
    where = ("--hosts", "2", "--bandwidth", "100gbit", "--latency-us", "0")
    flags = ("--update-ms", "5", "--top", "100")
    assert plan(*where, *flags, parameters="1M", compute="20") == 0
    rows = capsys.readouterr().out.splitlines()
    piped = next(row for row in rows if "width 2, psum, uncompressed" in row)
    assert " 25.0 ms " in piped
    assert plan(*where, "--update-ms", "21", parameters="1M", compute="20") == 2
    assert "`--update-ms` must be at most 20" in capsys.readouterr().err
