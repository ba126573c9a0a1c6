"""Where the seconds go, and what is counted: stopwatch and statistics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegraft.core import stopwatch
from treegraft.core.stats import DEFINITIONS, Generation, Statistics, StepRecord
from treegraft.core.stopwatch import DRAFTER, FORWARD, HOST, Stopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that moves when told: ``clock[0] += seconds``."""
    now = [100.0]
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: now[0])
    return now


# --- the stopwatch --------------------------------------------------------------------------------


def test_time_goes_to_the_innermost_stage(clock: list[float]) -> None:
    watch = Stopwatch()
    clock[0] += 1
    with watch.stage("tree"):
        clock[0] += 2
        with watch.stage("drafter"):
            clock[0] += 4
        clock[0] += 8
    clock[0] += 16
    assert watch.lap() == {HOST: 17.0, "tree": 10.0, "drafter": 4.0}


def test_a_lap_starts_anew(clock: list[float]) -> None:
    watch = Stopwatch()
    clock[0] += 5
    watch.lap()
    clock[0] += 1
    assert watch.lap() == {HOST: 1.0}


def test_time_while_the_caller_held_the_stream_is_nobodys(clock: list[float]) -> None:
    watch = Stopwatch()
    clock[0] += 1
    watch.lap()
    clock[0] += 1000
    watch.skip()
    clock[0] += 2
    assert watch.lap() == {HOST: 2.0}


def test_an_error_closes_its_stages(clock: list[float]) -> None:
    watch = Stopwatch()

    def fail() -> None:
        with watch.stage("a"), watch.stage("b"):
            clock[0] += 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    clock[0] += 4
    assert watch.lap() == pytest.approx({HOST: 4.0, "a": 0.0, "b": 3.0})


@given(st.recursive(st.integers(0, 5), lambda inner: st.lists(inner, max_size=4), max_leaves=12))
def test_every_second_is_counted_once(plan: object) -> None:
    """Nested stages share out the whole time, whatever their shape."""
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopwatch, "perf_counter", lambda: now[0])
        watch = Stopwatch()

        def run(part: object, level: int) -> None:
            if isinstance(part, int):
                now[0] += part
                return
            assert isinstance(part, list)
            with watch.stage(f"level {level}"):
                for inner in part:
                    run(inner, level + 1)

        run(plan, 0)
        assert sum(watch.lap().values()) == now[0]


# --- the statistics -------------------------------------------------------------------------------


A = DRAFTER + "a"


def step(n_new: int, n_path: int, calls: tuple[int, ...], **seconds: float) -> StepRecord:
    return StepRecord(
        n_new=n_new,
        n_path=n_path,
        n_tree=1 + n_path,
        calls=calls,
        drafted=(3, 2),
        proposed=(4, 5),
        kept=(2, 1),
        accepted=(n_path, 0),
        accepted_alone=(n_path // 2, 0),
        seconds=seconds,
        path_sources=(0,) * n_path,
    )


def text(*steps: StepRecord, drafters: tuple[str, ...] = ("a", "b")) -> Generation:
    tokens = list(range(sum(s.n_new for s in steps)))
    return Generation(tokens, None, "length", 5, drafters, list(steps), {"prefill": 1.0, A: 0.5})


def test_figures_of_two_texts() -> None:
    first = text(step(3, 2, (0, 1), target=2.0, **{A: 0.5}), step(1, 0, (0,), target=2.0, host=0.5))
    second = text(step(2, 2, (1, 1, 1), target=1.0, **{FORWARD + "b": 1.0}))
    figures = Statistics.of([first, second])
    assert (figures.new_tokens, figures.target_calls) == (6, 3)
    assert figures.mean_accepted_length == 2.0
    assert figures.drafted == (9, 6)
    assert figures.proposed == (12, 15)
    assert figures.kept == (6, 3)
    assert figures.accepted == (4, 0)
    assert figures.accepted_alone == (2, 0)
    assert figures.accepted_by_depth == ((2, 2), (0, 0))
    assert figures.calls == (2, 4)
    assert figures.calls_by_layer == ((2, 1), (0, 2), (0, 1))
    assert figures.acceptance_by_depth == (2 / 3, 2 / 3)
    # What a drafter does before the first step is the drafter's.
    assert figures.seconds["prefill"] == 2.0
    assert figures.total_seconds == 2.0 + 5.0 + 1.5 + 0.5 + 1.0
    assert figures.tokens_per_second == 6 / 10.0
    assert figures.tokens_per_second_decode == 6 / 8.0
    assert figures.drafter_seconds == {"a": 1.5, "b": 1.0}
    # Neither a forward of the target nor of a drafter: 1.5 s of a's look-ups, 0.5 s of host.
    assert figures.overhead_share == pytest.approx(2.0 / 10.0)


def test_names_of_drafters_never_share_a_stage() -> None:
    """A drafter may be called like another one's stage."""
    names = ("a", "forward:a", "drafter:a")
    stages = [prefix + name for name in names for prefix in (DRAFTER, FORWARD)]
    assert len(set(stages)) == len(stages)


def test_every_figure_that_is_handed_out_is_defined() -> None:
    assert set(text(step(1, 0, ())).statistics.as_dict()) <= set(DEFINITIONS)


def test_a_text_without_drafters_has_figures() -> None:
    plain = Generation([1], None, "eos", 1, (), [StepRecord(1, 0, 1, (), (), (), (), (), (), {})])
    figures = plain.statistics.as_dict()
    assert figures["mean_accepted_length"] == 1.0
    assert figures["calls"] == {}
    assert figures["acceptance_by_depth"] == []
