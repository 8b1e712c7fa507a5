"""Whether results reach the goals, of results made up here."""

from __future__ import annotations

import json

import pytest

from bench import goals
from bench.cases import SUITES

SUITES_OF_GOALS = ("train", "fp16", "doc", "gqa", "tuning")
#: Times as fast as cuDNN (sm90) and FlashAttention-2 (sm80).
FAST, SLOW = 1.25, 0.8


def result(suite: str, arch: str | None, speeds: dict[str, float], **changes: float) -> dict:
    """As bench.run saves it: every peer at 100 TFLOP/s, ours so many times as fast, and where a
    case's name is that of a change, so many."""
    rows = [
        {**case.to_dict(), "provider": provider, "tflops": 100 * speed}
        for case in SUITES[suite]()
        for provider, speed in speeds.items()
    ]
    for row in rows:
        if row["provider"] in ("flash_cute", "sm80") and row["name"] in changes:
            row["tflops"] = 100 * changes[row["name"]]
    meta = {
        "device": "cuda",
        "capability": "9.0",
        "gpu": "H200",
        "arch": arch,
        "flash_cute": {"archs": []},
    }
    return {"meta": meta, "rows": rows}


def measured(speed: float) -> dict[str, float]:
    return {"flash_cute": speed, "sm80": speed, "fa2": 1.0, "cudnn": 1.0}


def verdicts(*results: dict) -> dict[tuple[str, str], str]:
    runs = goals.runs_of(results)
    return {(goal.text, goal.statistic): goal.judge(runs)[1] for goal in goals.GOALS}


def test_all_are_reached_or_missed() -> None:
    fast = [result(suite, "sm90", measured(FAST)) for suite in SUITES_OF_GOALS]
    assert len(verdicts(*fast)) == len(goals.GOALS)
    assert all(text.startswith("reached") for text in verdicts(*fast).values())
    slow = verdicts(*(result(suite, "sm90", measured(SLOW)) for suite in SUITES_OF_GOALS))
    of_speed = {text for (name, _), text in slow.items() if " over cuDNN" in name or "sm80" in name}
    assert of_speed == {"missed"}


@pytest.mark.parametrize("suite", SUITES_OF_GOALS)
def test_what_is_not_measured_is_not_reached(suite: str) -> None:
    others = [result(s, "sm90", measured(FAST)) for s in SUITES_OF_GOALS if s != suite]
    assert any("not measured" in text for text in verdicts(*others).values())
    no_peer = {"flash_cute": FAST, "sm80": FAST}
    alone = [result(s, "sm90", no_peer) for s in SUITES_OF_GOALS]
    assert all("not measured" in text for (name, _), text in verdicts(*alone).items()
               if " over cuDNN" in name or "sm80" in name)  # fmt: skip


def test_one_slow_point_is_the_lowest() -> None:
    name = "bf16 B4 N4096 H16 D128 causal"
    one = result("train", "sm90", measured(FAST), **{name: 0.99})
    found = verdicts(one)
    for over in ("sm90 over cuDNN", "sm80 over FlashAttention-2"):
        assert found[f"{over}, 36 points", "lowest"] == "missed"
        assert found[f"{over}, 36 points", "mean"] == "reached"
    runs = goals.runs_of([one])
    (goal,) = [g for g in goals.GOALS if g.text == "sm90 over cuDNN, 36 points"][1:]
    assert goal.judge(runs) == ("0.990", "missed", f"0.990 {name}")


def test_a_part_of_the_points() -> None:
    slow = {case.name: 1.0 for case in SUITES["train"]() if case.head_dim == 256}
    found = verdicts(result("train", "sm90", measured(FAST), **slow))
    assert found["sm80 over FlashAttention-2, D 64 and 128", "mean"] == "reached"
    assert found["sm80 over FlashAttention-2, D 256", "mean"] == "missed"
    short = {case.name: 1.0 for case in SUITES["train"]() if case.q_len <= 1024}
    found = verdicts(result("train", "sm90", measured(FAST), **short))
    assert found["sm90 over cuDNN, N up to 1024", "mean"] == "missed"
    long_full = ("sm90 over cuDNN, D 64 full, N from 4096", "lowest")
    assert found[long_full] == "reached"
    for suite, causal, goal in (
        ("train", False, long_full),
        ("doc", True, ("sm80 over FlashAttention-2, a long document, causal", "lowest")),
        ("doc", False, ("sm80 over FlashAttention-2, a long document, full", "lowest")),
    ):
        slow = {case.name: 1.0 for case in SUITES[suite]() if case.causal == causal}
        others = {case.name: 1.0 for case in SUITES[suite]() if case.causal != causal}
        assert verdicts(result(suite, "sm90", measured(FAST), **slow))[goal] == "missed"
        assert verdicts(result(suite, "sm90", measured(FAST), **others))[goal] == "reached"


def test_rates_of_two_runs_are_not_compared() -> None:
    ours = result("train", "sm90", {"flash_cute": FAST, "sm80": FAST})
    peers = result("train", "sm90", {"fa2": 1.0, "cudnn": 1.0})
    assert all("not measured" in verdict for verdict in verdicts(ours, peers).values())


def test_wrong_results_and_other_tiles_do_not_count() -> None:
    wrong = result("train", "sm90", measured(FAST))
    for row in wrong["rows"]:
        row["correct"] = row["head_dim"] != 64
    assert verdicts(wrong)["sm80 over FlashAttention-2, D 256", "mean"] == "reached"
    assert "12 of 36" in verdicts(wrong)["sm90 over cuDNN, 36 points", "mean"]
    assert (
        "12 of 36"
        in verdicts(result("train", "sm90", measured(FAST)), wrong)[
            "sm90 over cuDNN, 36 points", "mean"
        ]
    )  # that it was right before is no help
    small_tiles = result("train", None, {"flash_cute": FAST, "fa2": 1.0, "cudnn": 1.0})
    small_tiles["meta"]["smem_limit"] = 101376
    assert all("not measured" in verdict for verdict in verdicts(small_tiles).values())


def test_noise_is_named_and_changes_nothing() -> None:
    (goal,) = [g for g in goals.GOALS if g.text == "sm80 over FlashAttention-2, D 256"]
    for speed, verdict in ((1.049, "missed, within noise"), (1.051, "reached, within noise")):
        runs = goals.runs_of([result("train", "sm90", measured(speed))])
        assert goal.judge(runs)[1] == verdict


def test_ratios_among_ours() -> None:
    as_fast = [result(suite, "sm90", measured(FAST)) for suite in SUITES_OF_GOALS]
    for suite, name, goal in (
        ("fp16", "fp16 B4 N4096 H16 D128 full", ("sm90: fp16's ratios over bf16's", "lowest")),
        ("gqa", "bf16 B4 N4096 H32/8 D128 full", ("sm90: 32/8 heads over 32, D 128", "lowest")),
        ("tuning", "bf16 B4 N4096 H21 D96 full", ("sm90: D 96 over D 64 and 128", "mean")),
        ("tuning", "bf16 B4 N4096 H10 D192 full", ("sm90: D 192 over D 128 and 256", "mean")),
    ):
        slower = result(suite, "sm90", measured(FAST), **{name: 0.7 * FAST})
        found = verdicts(*as_fast, slower)  # the last file decides
        missed = {text for text, verdict in found.items() if verdict == "missed"}
        assert missed == {goal}


@pytest.mark.parametrize(
    "arch, capability, codes, kernels",
    [
        ("sm90", "9.0", ["sm_90a"], "sm90"),
        ("sm80", "9.0", ["sm_90", "sm_90a"], "sm80"),
        (None, "9.0", ["sm_90"], "sm80"),
        (None, "9.0", ["sm_90", "sm_90a"], "sm90"),
        (None, "8.0", ["sm_80", "sm_90a"], "sm80"),
    ],
)
def test_which_kernels_ran(arch, capability, codes, kernels) -> None:
    build = {"archs": codes}
    meta = {"device": "cuda", "capability": capability, "arch": arch, "flash_cute": build}
    assert goals.kernels_of({"provider": "flash_cute"}, meta) == kernels
    assert goals.kernels_of({"provider": "sm80"}, meta) == "sm80"
    assert goals.kernels_of({"provider": "cudnn"}, meta) == "cudnn"
    assert goals.kernels_of({"provider": "flash_cute"}, {"device": "cpu"}) == "flash_cute"


def test_command(tmp_path, capsys) -> None:
    files = []
    for suite in SUITES_OF_GOALS:
        files.append(str(tmp_path / f"{suite}.json"))
        (tmp_path / f"{suite}.json").write_text(json.dumps(result(suite, "sm90", measured(FAST))))
    assert goals.main(files) == 0
    assert f"{len(goals.GOALS)} of {len(goals.GOALS)} reached on H200" in capsys.readouterr().out
    assert goals.main(files[:1]) == 1
    for text, message in (
        ("[]", "is no result file"),
        ('{"meta": {"device": "cuda"}, "rows": [1]}', "not as bench.run saves it: TypeError"),
        ('{"meta": [], "rows": []}', "not as bench.run saves it: AttributeError"),
        ('{"meta": {}, "rows": [{"tflops": 1}]}', "not as bench.run saves it: KeyError"),
    ):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(SystemExit):
            goals.main([str(tmp_path / "other.json")])
        assert message in capsys.readouterr().err
