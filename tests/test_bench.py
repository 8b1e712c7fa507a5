"""The bench, without a GPU: what it counts, what its rows hold, its command line and its files."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

import flash_cute
from bench import (
    accuracy,
    baselines,
    check,
    compare_wheels,
    environment,
    harness,
    host_time,
    memory,
    plot,
    results,
    run,
    tables,
)
from bench.baselines import PROVIDERS
from bench.cases import OPS, SCORES, SUITES, Case, make_inputs, packed, square
from flash_cute import plan, reference
from flash_cute.ops import build_info

CPU = torch.device("cpu")
FAST = harness.Options(device=CPU, rounds=2, iters=2, check=True)


def small(causal: bool = True, q_len: int = 24, kv_len: int = 24, **more: object) -> Case:
    case = Case(2, 4, 2, q_len, kv_len, 16, causal)
    return dataclasses.replace(case, **more)  # type: ignore[arg-type]


def words(command_line: str) -> list[str]:
    return command_line.split()


def test_train_suite_is_the_36_points() -> None:
    cases = list(SUITES["train"]())
    assert len(set(cases)) == 36
    for case in cases:
        assert case.batch * case.q_len == 16384
        assert case.heads * case.head_dim == 2048
        assert case.q_len == case.kv_len and case.heads == case.kv_heads and case.dtype == "bf16"
    assert {case.q_len for case in cases} == {512, 1024, 2048, 4096, 8192, 16384}


def test_the_backward_begins_with_what_is_known_of_peers() -> None:
    forward_too = [dataclasses.replace(case, op="bwd") for case in SUITES["fwdbwd"]()]
    assert forward_too == list(SUITES["bwd"]()) and len(forward_too) == 28
    rows = [row for row in made_up_rows("bwd") if row["provider"] != "cudnn"]
    for row in rows[:28]:  # 14 points, one of them of no gain
        row["ms"] = 1.0 if row["name"] == rows[0]["name"] else row["ms"] * 2
    every, first = tables.means(rows)
    assert "mean of 28 points. Lowest 1.00x" in every and "14 points. Lowest 1.00x" in first


@pytest.mark.parametrize("suite", SUITES)
def test_suites_have_no_duplicates(suite: str) -> None:
    cases = list(SUITES[suite]())
    assert cases and len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (3, 9), (9, 3), (1, 7), (7, 1)])
def test_visible_pairs_are_counted_exactly(q_len: int, kv_len: int) -> None:
    mask = torch.ones(q_len, kv_len).tril(kv_len - q_len)
    assert small(True, q_len, kv_len).visible_pairs() == int(mask.sum())
    assert small(False, q_len, kv_len).visible_pairs() == q_len * kv_len


@pytest.mark.parametrize(("q_len", "kv_len"), [(20, 20), (7, 33), (33, 7)])
@pytest.mark.parametrize("window", [-1, 0, 4, 40])
def test_visited_blocks_are_those_that_the_mask_touches(
    window: int, q_len: int, kv_len: int
) -> None:
    case = small(True, q_len, kv_len, window=window)
    offset = kv_len - q_len
    mask = torch.ones(q_len, kv_len).tril(offset)
    if window >= 0:
        mask = mask.triu(offset - window)
    padded = torch.nn.functional.pad(mask, (0, -kv_len % 4, 0, -q_len % 6))
    touched = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 6)).amax((1, 3))
    assert case.visited_pairs(6, 4) == int(touched.sum()) * 6 * 4
    assert case.visited_pairs(1, 1) == int(mask.sum())


def test_flops_and_bytes() -> None:
    full = square(4, 4096, 16, 128, causal=False)
    assert full.flops() == 4 * 4 * 16 * 4096 * 4096 * 128
    assert dataclasses.replace(full, causal=True).flops() == full.flops() // 2
    assert dataclasses.replace(full, op="bwd").flops() == full.flops() * 5 // 2
    assert dataclasses.replace(full, causal=True, op="fwdbwd").flops() == full.flops() * 7 // 4
    continued = Case(1, 2, 1, 10, 100, 64, causal=True)
    assert continued.flops() == 4 * 2 * 64 * sum(range(91, 101))
    assert Case(8, 32, 8, 1, 4096, 128, True).kv_bytes() == 2 * 8 * 8 * 4096 * 128 * 2
    tensors = make_inputs(small(), CPU)
    results = flash_cute.forward(*tensors)
    assert small().bytes() == sum(x.nbytes for x in (*tensors, *results))
    backward = *tensors, *results, *tensors, results[0]  # with gradients
    assert small(op="bwd").bytes() == sum(x.nbytes for x in backward)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_inputs(layout: str) -> None:
    case = small(layout=layout, kv_len=40)
    q, k, v = make_inputs(case, CPU)
    assert q.shape == (2, 4, 24, 16) and k.shape == v.shape == (2, 2, 40, 16)
    assert q.transpose(1, 2).is_contiguous() == (layout == "bnhd")
    assert q.std() > 0.5 and not torch.equal(k, v)
    assert torch.equal(q, make_inputs(case, CPU)[0])


@pytest.mark.parametrize("case", [small(), small(False), small(q_len=40), small(kv_len=40)])
def test_pieces_cover_a_case_and_change_nothing(case: Case) -> None:
    covered = torch.zeros(case.batch, case.q_len, dtype=torch.int)
    for batches, rows, _ in check.pieces(case, limit=400):
        covered[batches, rows] += 1
    assert (covered == 1).all()

    tensors = make_inputs(case, CPU)
    results = {"rounded": (reference.attention(*tensors, case.causal)[0].to(torch.bfloat16), None)}
    pieced = check.check(case, tensors, results, limit=400)["rounded"]
    whole = check.check(case, tensors, results)["rounded"]
    assert pieced["correct"] and whole["correct"] and whole["lse_error"] is None
    assert pieced["error"] == pytest.approx(whole["error"]) != 0


def test_check_finds_wrong_results() -> None:
    case = small()
    q, k, v = make_inputs(case, CPU)
    out, lse = reference.attention(q, k, v, is_causal=True)
    holed, shifted = out.clone(), lse + 1e-3
    holed[1, 2, 3, 4] = torch.nan
    results = {"right": (out, None), "nan": (holed, None), "lse": (out, shifted)}
    errors = check.check(case, (q, k, v), results)
    assert errors["right"]["correct"]
    assert not errors["nan"]["correct"] and errors["nan"]["error"] == float("inf")
    assert not errors["lse"]["correct"]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_check_of_gradients_finds_wrong_results(kv_heads: int) -> None:
    case = small(kv_heads=kv_heads, kv_len=40, op="bwd")
    q, k, v, dout = make_inputs(case, CPU)
    right = reference.attention_backward(dout, q, k, v, is_causal=True)
    holed = right[0].clone(), *right[1:]
    holed[0][1, 2, 3, 4] = torch.nan
    results = {"right": right, "nan": holed, "shifted": (*right[:2], right[2] + 0.1)}
    whole = check.check_gradients(case, (q, k, v, dout), results)
    assert [row["correct"] for row in whole.values()] == [True, False, False]
    pieced = check.check_gradients(case, (q, k, v, dout), results, limit=1)
    for name, row in pieced.items():
        assert row["correct"] == whole[name]["correct"]
        assert row["errors"] == pytest.approx(whole[name]["errors"])


@pytest.mark.parametrize("head_dim_v", [0, 8])
@pytest.mark.parametrize("op", OPS)
def test_rows(op: str, head_dim_v: int) -> None:
    providers = [PROVIDERS[name] for name in ("flash_cute", "fa2", "triton", "math")]
    case = small(op=op, head_dim_v=head_dim_v)
    rows = {row["provider"]: row for row in harness.measure(case, providers, FAST)}
    assert rows["triton"]["status"] == "skipped" and rows["triton"]["note"]
    for name in ("flash_cute", "math", *(() if head_dim_v else ("fa2",))):
        row = rows[name]
        assert row["status"] == "ok" and row["correct"], row
        assert row["ms"] >= row["ms_min"] > 0 and len(row["round_ms"]) == 2 and row["iters"] == 2
        assert row["tflops"] == pytest.approx(case.flops() / row["ms"] * 1e-9)
    assert op != "fwd" or rows["flash_cute"]["lse_error"] < 1e-5


@pytest.mark.parametrize("score", SCORES)
def test_changed_scores(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    providers = [PROVIDERS[name] for name in ("flash_cute", "flex", "fa2")]
    case = small(score=score)
    ours, flex, fa2 = harness.measure(case, providers, FAST)
    assert ours["correct"] and flex["correct"] and fa2["status"] == "skipped"
    assert ours["score"] == score
    tensors = make_inputs(case, CPU)
    plain = {"plain": flash_cute.forward(*tensors[:3], is_causal=True)}
    assert not check.check(case, tensors, plain)["plain"]["correct"]

    case = small(score=score, op="bwd")
    (row,) = harness.measure(case, providers[:1], FAST)
    assert row["correct"] and len(row["errors"]) == (4 if "trained" in score else 3)
    tensors = make_inputs(case, CPU)
    right = baselines.bind_op(PROVIDERS["flash_cute"], case, tensors)()
    for i in range(len(right)):
        wrong = {"wrong": (*right[:i], right[i] + 1, *right[i + 1 :])}
        assert not check.check_gradients(case, tensors, wrong)["wrong"]["correct"]


def test_tables_of_windows_and_scores() -> None:
    """Times as multiples of the ideal, and of the plain kernel's."""
    rows = []
    for case, ms in ((small(), 8.0), (small(window=3), 3.0), (small(window=9), 3.0)):
        row = {**case.to_dict(), "provider": "flash_cute", "status": "ok", "ms": ms, "tflops": 1.0}
        row |= {"tile": (8, 8), "copy_ms": 1.0}  # of the 6 blocks, windows touch 5 and 6
        rows.append(row)
    lines = tables.windows(rows).splitlines()
    assert "flash_cute / ideal" in lines[0] and "sm80" not in lines[0]
    ends = [line.split("|")[-2].strip() for line in lines[2:]]
    assert ends == ["-", "0.45x", "0.38x"]
    rows[1]["copy_ms"] = 10.0
    assert "0.30x" in tables.windows(rows)

    rows = [{**rows[0], "score": score, "name": score, "ms": ms} for score, ms in
            (("softcap", 12.0), ("bias", 16.0))] + rows[:1]  # fmt: skip
    flex = [{**rows[0], "provider": "flex", "ms": 24.0}]
    text = tables.scores(rows + flex).splitlines()
    assert [cell.strip() for cell in text[0].split("|")[-3:-1]] == [
        "flash_cute / plain", "flash_cute to flex",
    ]  # fmt: skip
    assert [cell.strip() for cell in text[2].split("|")[-3:-1]] == ["1.50x", "2.00x"]


def test_rows_have_what_an_ideal_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's tile, and the time of a copy."""
    (row,) = harness.measure(small(window=3), [PROVIDERS["flash_cute"]], FAST)
    assert row["tile"] == (128, 128) and row["copy_ms"] > 0 and row["correct"]
    monkeypatch.setattr(plan, "device_here", lambda: plan.DEVICES["h100"])
    for op, tuning in (("fwd", ""), ("bwd", ""), ("bwd", "arch=80")):
        case = square(1, 8192, 16, 128, True, window=1023, op=op)
        arch = "sm80" if tuning else "sm90"
        tile = harness.tile_of(case, tuning, torch.device("cuda"))
        known = [x for x in build_info()["tiles"] if (x["arch"], x["op"]) == (arch, op)]
        assert tile in [(x["block_m"], x["block_n"]) for x in known if x["head_dim"] == 128]


@pytest.mark.parametrize("documents", [(30, 30), (64, 10, 20)])
def test_rows_of_chunks_of_documents(documents: tuple[int, ...]) -> None:
    case = dataclasses.replace(packed(documents, 1024), q_len=5 * len(documents))
    assert case.visible_pairs() == 5 * case.kv_len - 10 * len(documents)
    names = ["flash_cute"] if len(set(documents)) > 1 else ["flash_cute", "dense"]
    for row in harness.measure(case, [PROVIDERS[name] for name in names], FAST):
        assert row["correct"] and row["status"] == "ok"


def test_decoding_rows_have_a_bandwidth() -> None:
    case = small(q_len=1, kv_len=64)
    for row in harness.measure(case, [PROVIDERS["flash_cute"], PROVIDERS["fa2"]], FAST):
        assert row["gbps"] == pytest.approx(case.kv_bytes() / row["ms"] * 1e-6)
        assert row["correct"]


def test_overrides_of_the_op() -> None:
    """By their names. A run takes them on a GPU alone; the op takes them everywhere."""
    tuned = [PROVIDERS["sm80"], baselines.tuned("splits=3,arch=80")]
    rows = harness.measure(small(), tuned, FAST)
    assert [row["provider"] for row in rows] == ["sm80", "splits=3,arch=80"]
    assert all(row["status"] == "skipped" and row["note"] == "needs a GPU" for row in rows)
    inputs = make_inputs(small(), CPU)
    for provider in tuned:
        out, lse = provider.bind(small(), *inputs)()
        expected = flash_cute.forward(*inputs, is_causal=True)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_peers_alternate() -> None:
    """Each comes behind each neighbour and before it, and each is first in its turn."""
    orders = [harness.turn_order("abc", turn) for turn in range(6)]
    assert ["".join(order) for order in orders] == ["abc", "cba", "bca", "acb", "cab", "bac"]


def test_grouped_heads_are_measured_beside_as_many_heads() -> None:
    cases = list(SUITES["gqa"]())
    for op, causal in itertools.product(("fwd", "bwd"), (False, True)):
        same = [c for c in cases if (c.q_len, c.op, c.causal) == (4096, op, causal)]
        assert {case.kv_heads for case in same} == ({32, 8, 1} if op == "fwd" else {32, 8})
        assert len({case.flops() for case in same}) == 1


def test_every_head_dim_that_is_built_can_be_tuned() -> None:
    built = set(build_info()["head_dims"])
    assert built <= {case.head_dim for case in SUITES["tuning"]()}


def test_what_a_peer_refuses_is_reported() -> None:
    continued = small(q_len=8, kv_len=24)
    cudnn, fa2 = harness.measure(continued, [PROVIDERS["cudnn"], PROVIDERS["fa2"]], FAST)
    assert cudnn["status"] == fa2["status"] == "skipped" and "top left" in fa2["note"]
    (refused,) = harness.measure(small(), [PROVIDERS["cudnn"]], FAST)
    assert refused["status"] == "skipped" and "ms" not in refused


def test_a_failing_provider_is_reported() -> None:
    def bind(*_: object) -> baselines.Call:
        raise RuntimeError("broken")

    (row,) = harness.measure(small(), [baselines.Provider("flash_cute", "", bind)], FAST)
    assert row["status"] == "failed" and row["note"] == "broken"


def test_a_run_fails_where_ours_do() -> None:
    """Whatever makes ours by name or number; what a peer does changes nothing."""
    provider_of = {
        name: PROVIDERS[name] if name in PROVIDERS else baselines.tuned(name)
        for name in ("flash_cute", "sm80", "splits=4", "fa2")
    }
    for changes, wrong in (
        ({"status": "ok"}, set()),
        ({"status": "ok", "correct": True}, set()),
        ({"status": "ok", "correct": False}, {"flash_cute", "sm80", "splits=4"}),
        ({"status": "failed"}, {"flash_cute", "sm80", "splits=4"}),
        ({"status": "skipped"}, {"flash_cute"}),  # overrides are not for the CPU
    ):
        for name, provider in provider_of.items():
            assert provider.name == name
            assert run.went_wrong([{"provider": name} | changes], [provider]) == (name in wrong)


def test_the_commit_is_that_of_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_output", lambda *command: "abc" if "HEAD" in command else "")
    monkeypatch.setattr(flash_cute, "__file__", str(environment.REPOSITORY / "flash_cute/x.py"))
    assert environment.commit() == "abc"
    monkeypatch.setattr(flash_cute, "__file__", "/site-packages/flash_cute/__init__.py")
    assert environment.commit() is None


def test_iterations_follow_the_budget() -> None:
    options = harness.Options(device=CPU, budget_ms=20.0)
    assert harness._iterations(options, 1.0) == 20
    assert harness._iterations(options, 100.0) == options.min_iters
    assert harness._iterations(options, 1e-6) == options.max_iters


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--suite nope", "invalid choice"),
        ("--B 0", "at least 1"),
        ("--N many", "invalid"),
        ("--H 3 --Hkv 2", "no multiple"),
        ("--dtype fp8", "invalid choice"),
        ("--baselines fa9", "'fa9'"),
        ("--suite train --D 32", "no case"),
        ("--host-time --memory", "not allowed with"),
        ("--device cpu --memory", "allocator"),
        ("--device cpu --tuning splits=4", "--tuning is of the GPU's kernels"),
        ("--tuning splits", "not of the form"),
        ("--seed 18446744073709551616", "is not from -2**63"),
        ("--D 1025", "above 1024"),
        ("--D 0", "at least 1"),
        ("--json bench", "is a folder"),
        ("--json README.md/x.json", "cannot be written"),
    ],
)
def test_bad_arguments(
    argv: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(Path(run.__file__).parent.parent)
    with pytest.raises(SystemExit) as stopped:
        run.main(words(argv))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_suites_are_filtered_and_replaced() -> None:
    parser = run.build_parser()
    args = parser.parse_args(words("--suite train --D 64 --N 512 --causal --dtype fp16"))
    (case,) = run.select_cases(parser, args)
    assert case == square(32, 512, 32, 64, True, dtype="fp16")


def test_command_line_writes_rows_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, figure = tmp_path / "deep" / "rows.json", tmp_path / "rows.png"
    shape = "--device cpu --B 2 --H 2 --N 32 --D 16 --causal --iters 1 --rounds 2 --check"
    argv = [*words(shape), "--baselines", "fa2", "--json", str(path)]
    assert run.main(argv) == 0
    text = capsys.readouterr().out
    assert "to fa2" in text and "flash_cute: 1 of 1 correct" in text
    result = json.loads(path.read_text())
    assert [row["provider"] for row in result["rows"]] == ["flash_cute", "fa2"]
    assert {"date", "argv", "commit", "torch", "device"} <= result["meta"].keys()
    assert str(tmp_path) not in path.read_text()
    pytest.importorskip("matplotlib")
    assert plot.main([str(path), "-o", str(figure)]) == 0
    assert figure.stat().st_size > 1000


def test_host_time_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    providers = [PROVIDERS["flash_cute"], PROVIDERS["fa2"], PROVIDERS["triton"]]
    rows = host_time.measure_host_time(providers, FAST, rounds=2, calls=3)
    assert len(rows) == 3 * 2 * 3
    assert all(row["host_us"] > 0 for row in rows if row["provider"] != "triton")
    assert "no_grad" in tables.host_time(rows)


def test_host_time_of_doors() -> None:
    rows = host_time.measure_doors(FAST, rounds=2, calls=2)
    ours = [row for row in rows if row["provider"] == "flash_cute"]
    assert len(ours) >= 8 and len(rows) == 2 * len(ours)
    assert all(row["host_us"] > 0 for row in ours)
    assert "varlen_attn, fwdbwd" in tables.doors(rows)


def test_a_training_step_in_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from bench import llama

    path = tmp_path / "llama.json"
    sizes = "--layers 1 --hidden 64 --batch 2 --length 32 --rounds 1"
    try:
        assert llama.main([*words(sizes), "--json", str(path)]) == 0
    finally:
        flash_cute.unregister()
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"].split(",")[0] for row in rows[::2]] == list(llama.MODES)
    assert all(abs(row["loss"] - row["loss_of_fp32"]) < 0.02 for row in rows)


def test_memory_needs_a_gpu_and_counts_the_results() -> None:
    assert memory.output_bytes(small()) == 2 * 4 * 24 * (16 * 2 + 4)
    assert memory.output_bytes(small(op="fwdbwd")) == 2 * 4 * 24 * (16 * 2 * 3 + 4)
    with pytest.raises(ValueError, match="no GPU"):
        memory.measure_memory([PROVIDERS["flash_cute"]], FAST)


def test_accuracy_rows() -> None:
    cases = [(small(op="bwd"), 1.0), (small(q_len=40, op="bwd"), 6.0), (small(), 1.0)]
    rows = accuracy.measure_accuracy([PROVIDERS["flash_cute"], PROVIDERS["fa2"]], FAST, cases)
    assert len(rows) == (2 * 3 + 1) * 2
    assert rows[6]["name"].endswith(" x6, dq") and rows[-1]["name"].endswith(", out")
    for row in rows:
        assert row["status"] == "skipped" or 0 < row["rmse"] < row["max_error"] < 0.1
    assert "- (-)" in tables.accuracy(rows) and "RMSE of SDPA flash (FA2)" in tables.means(rows)[1]


def made_up_rows(suite: str = "train") -> list[harness.Row]:
    rows = []
    for case in SUITES[suite]():
        for provider, ms in (("flash_cute", 1.0), ("fa2", 1.5), ("cudnn", 0.5)):
            row = {**case.to_dict(), "provider": provider, "status": "ok"}
            harness.finish_row(row, case, [[ms]], 1)
            rows.append(row)
    return rows


def test_means_have_the_extremes() -> None:
    rows = made_up_rows()
    rows[0] |= {"ms": 3.0}
    text = "\n".join(tables.means(rows))
    assert "flash_cute is 1.45x as fast as SDPA flash (FA2)" in text
    assert "0.50x (bf16 B32 N512 H32 D64 full), highest 1.50x" in text


def test_documents_come_from_the_files(tmp_path: Path) -> None:
    assert "train.json" not in results.document(tmp_path)
    made_up = {"meta": {"torch": "x", "date": "2026-01-01", "gpu": "NVIDIA H0"}}
    for name in ("train", "train_h100", "prefill", "decode"):
        run.save(tmp_path / f"{name}.json", {**made_up, "rows": made_up_rows()})
    text = results.document(tmp_path)
    assert "1.50x as fast as SDPA flash (FA2)" in text and "0.50x as fast as SDPA cuDNN" in text
    first = [cell.strip() for cell in results.readme(tmp_path).splitlines()[2].split("|")]
    assert first[1] == "36 points, N 512 to 16384, beside SDPA flash (FA2)"
    assert first[2] == "1.50 (1.50)"


def test_documents_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert results.main(["--check"]) == 0, capsys.readouterr().out
    shown = {f"{name}.json" for section in results.SECTIONS for name in section.files}
    assert shown >= {path.name for path in results.RESULTS.glob("*.json")}


def test_wheels_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The new one has a process that was disturbed, which its median leaves out."""
    taken, path = [], tmp_path / "wheels.json"

    def process(folder: Path, suite: str | None) -> compare_wheels.Medians:
        taken.append(folder.name)
        slow = folder.name == "new" and len(taken) == 2
        old = {"a": 1.0, "b": 2.0}
        return old if folder.name == "old" else {"a": 9.0 if slow else a, "b": b}

    monkeypatch.setattr(compare_wheels, "process", process)
    for a, b, status in ((1.0, 2.0, 0), (0.9, 1.0, 0), (1.0, 2.03, 1), (0.9, 2.1, 1)):
        taken.clear()
        assert compare_wheels.main(["old", "new", "--json", str(path)]) == status
        assert taken[:4] == ["old", "new", "new", "old"]
        assert taken.count("old") == taken.count("new") == 7
        rows = json.loads(path.read_text())["rows"]
        assert [row["ratio"] for row in rows] == [1.0 / a, 2.0 / b]


def test_a_wheel_is_measured_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "default_device", lambda: CPU)
    cases = [small(dtype="fp16"), small(dtype="fp16", op="bwd")]
    monkeypatch.setitem(SUITES, "prefill", lambda: cases)
    medians = compare_wheels.measure("prefill")
    assert list(medians) == [small(dtype="fp16").name] and min(medians.values()) > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("peer", "case"),
    [
        ("triton", small(q_len=130, kv_len=200, head_dim=64)),
        ("triton", small(False, head_dim=40)),
        ("fa2", small(q_len=130, kv_len=200, head_dim=64)),
        ("fa2", dataclasses.replace(packed((100, 300), 64), q_len=70)),
        ("flex", small(q_len=128, kv_len=128, head_dim=64, score="alibi", op="bwd")),
        ("flex", small(q_len=128, kv_len=128, head_dim=64, score="trained bias", op="bwd")),
    ],
)
def test_peers_on_the_gpu(peer: str, case: Case) -> None:
    pytest.importorskip("triton")
    gpu = harness.Options(device=torch.device("cuda"), rounds=1, iters=1, check=True)
    (row,) = harness.measure(case, [PROVIDERS[peer]], gpu)
    assert row["status"] == "ok" and row["correct"], row
