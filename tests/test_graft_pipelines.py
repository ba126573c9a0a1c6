"""Every graft, builder and rider in whole pipelines: tokens are plain decoding's, counts add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import TableModel, hashed_model, looping_model, mixed_model

from treegraft.backends.reference import plain_tokens
from treegraft.composition import component_graph
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError, PolicyError
from treegraft.core.roles import Drafter, GraftPolicy, Touched, TreeBackend, TreeBuilder
from treegraft.core.sampling import Sampling
from treegraft.core.stats import Generation
from treegraft.core.tree import TokenTree
from treegraft.pipeline import Pipeline, build_pipeline

V = 8
TARGET = hashed_model(V, seed=1, order=6)
MODELS = {
    "target": TARGET,
    "near": mixed_model(TARGET, hashed_model(V, seed=2), 0.3),
    "far": hashed_model(V, seed=3),
}
NGRAM = {"kind": "ngram"}
NEAR = {"kind": "lm", "model": "near"}
FAR = {"kind": "lm", "model": "far"}
ALL = [NGRAM, FAR, NEAR]
PROMPT = [1, 2, 3, 1, 2, 3]


def pipeline(**options: Any) -> Pipeline:
    config = {
        "target": {"model": "target"},
        "drafters": ALL,
        "builder": {"kind": "layered", "depth": 3, "width": 3, "budget": 12},
        **options,
    }
    return build_pipeline(parse_config(config), models=MODELS)


def plain(n: int, target: TableModel = TARGET, **sampling: Any) -> list[int]:
    return plain_tokens(lambda text: target.logits(text).float(), PROMPT, n, Sampling(**sampling))


def fixed(*calls: str) -> dict[str, Any]:
    return {"kind": "fixed", "calls": list(calls)}


# --- riding along ---------------------------------------------------------------------------------


def counts(result: Generation) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(step.calls, step.side_calls) for step in result.steps]


def test_a_rider_acts_before_each_visit_of_a_model_and_in_no_other_layer() -> None:
    made = pipeline(
        ride_along=["ngram"],
        graft={"kind": "treegraft", "reach": "any"},
        scheduler=fixed("near", "ngram", "far"),
    )
    result = made.generate(PROMPT, max_new_tokens=30)
    assert result.tokens == plain(30)
    assert counts(result)[0] == ((2, 0, 1), (2, 0, 0))
    statistics = result.statistics
    assert statistics.side_calls[1:] == (0, 0)
    assert statistics.side_calls[0] == statistics.calls[1] + statistics.calls[2]
    assert statistics.as_dict()["side_calls"]["ngram"] == statistics.side_calls[0]
    # It drafted more than the layers of its own would have.
    alone = pipeline(scheduler=fixed("near", "ngram", "far")).generate(PROMPT, max_new_tokens=30)
    assert alone.statistics.side_calls == (0, 0, 0)
    assert sum(s.drafted[0] for s in result.steps[:1]) >= sum(s.drafted[0] for s in alone.steps[:1])


class Seen(GraftPolicy):
    """Notes who visits and from where; a model puts nothing above what is there."""

    notes: list[tuple[int, list[int], int]] = []  # noqa: RUF012

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Any, width: int
    ) -> Touched:
        Seen.notes.append((index, frontier.tolist(), tree.n_nodes))
        proposals = drafter.propose(tree, frontier, width)
        paths = tree.add_(proposals, index, overwrite=False)
        return Touched(paths[:, 0], proposals.match)


def test_riders_come_first_from_the_same_frontier_and_ranks_are_by_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Seen, "notes", [])
    own = "adversarial_drafters:Scripted"
    made = pipeline(
        drafters=[
            {
                "kind": own,
                "name": "sure",
                "params": {"paths": [[7, 7]], "score": -50.0, "match": 9},
            },
            {"kind": own, "name": "idle", "params": {"paths": [], "match": 9}},
            NEAR,
        ],
        ride_along=["idle", "sure"],
        graft={"kind": "test_graft_pipelines:Seen"},
        builder={"kind": "layered", "depth": 3, "width": 2, "budget": 12},
        scheduler={"kind": "always"},
    )
    next(made.stream(PROMPT))
    first, second = Seen.notes[:3], Seen.notes[3:6]
    # In the order in which they are named, each before the model.
    assert [index for index, _, _ in first] == [1, 0, 2]
    assert [frontier for _, frontier, _ in first] == [[0]] * 3
    assert [n for _, _, n in first] == [1, 1, 3]
    # Layer 1 keeps every child, and a match of 9 did not put the rider's child first.
    frontier = second[0][1]
    assert len(frontier) == 3
    assert frontier[-1] == 1
    # From layer 2 on the best two by score: a rider's paths at -50 are not among them.
    third = Seen.notes[6][1]
    assert len(third) == 2


def test_what_riders_found_is_taken_up_only_with_any_reach() -> None:
    """The rider knows the text; under the model's rescoring its deep tokens become positions."""
    accepted = {}
    for reach in ("frontier", "any"):
        made = pipeline(
            drafters=[
                {
                    "kind": "adversarial_drafters:Scripted",
                    "name": "oracle",
                    "params": {"paths": [plain(40)[:4]], "score": -0.1},
                },
                {"kind": "lm", "model": "target", "name": "self"},
            ],
            ride_along=["oracle"],
            graft={"kind": "treegraft", "reach": reach},
            builder={"kind": "layered", "depth": 1, "width": 9, "budget": 40},
            scheduler={"kind": "always"},
        )
        first = next(made.stream(PROMPT)).step
        accepted[reach] = first.n_path
    # Both read the rider's four tokens; only one hangs the model's own below them.
    assert accepted == {"frontier": 4, "any": 5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ride_along": ["suffix"]},
            "ride_along names drafter 'suffix', found drafters ['ngram', ",
        ),
        ({"ride_along": ["near"]}, "ride_along takes drafters that do not score, found 'near'"),
        ({"ride_along": ["ngram", "ngram"]}, "ride_along must hold each name once, found 'ngram'"),
        (
            {"ride_along": ["ngram"], "graft": {"kind": "replace"}},
            "ride_along needs a graft that keeps what look-ups drafted, found graft.kind 'replace'",
        ),
    ],
)
def test_riders_that_cannot_ride_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"target": {"model": "target"}, "drafters": ALL, **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_drafter_of_ones_own_that_scores_cannot_ride() -> None:
    own = {
        "kind": "adversarial_drafters:ScriptedScorer",
        "params": {"paths": [[1]], "score": -0.1},
        "name": "own",
    }
    config = parse_config(
        {"target": {"model": "target"}, "drafters": [own, NEAR], "ride_along": ["own"]}
    )
    with pytest.raises(
        ConfigError, match="ride_along takes drafters that do not score, found 'own'"
    ):
        component_graph(config)


# --- leftovers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["tensor", "reference"])
def test_what_hangs_below_the_bonus_token_starts_the_next_tree(backend: str) -> None:
    """A budget of one node: the target's own chain of four is drafted, and three are left over."""
    made = pipeline(
        drafters=[
            {
                "kind": "adversarial_drafters:Scripted",
                "name": "first",
                "params": {"paths": [plain(9)[:5], [7]], "score": -0.1},
            }
        ],
        builder={"kind": "layered", "depth": 1, "width": 2, "budget": 1},
        leftover=True,
        backend={"kind": backend},
    )
    result = made.generate(PROMPT, max_new_tokens=9)
    assert result.tokens == plain(9)
    first, second, third = result.steps[:3]
    # One of five is read and accepted, the second is the bonus token, three start the next tree.
    assert (first.n_path, first.reused, second.reused) == (1, 0, 3)
    assert second.n_path == 1
    assert third.reused == 1
    statistics = result.statistics
    assert statistics.reused == sum(step.reused for step in result.steps)
    assert statistics.reuse_rate == sum(s.reused > 0 for s in result.steps) / len(result.steps)


def test_nothing_is_left_over_by_default_or_of_a_drawn_tree() -> None:
    options = {
        "drafters": [{**NEAR, "children": "topk_plus_one_sample"}],
        "builder": {"kind": "layered", "depth": 3, "width": 3, "budget": 3},
        "sampling": {"temperature": 1.0},
        "verifier": {"kind": "ledger"},
    }
    assert pipeline(leftover=True, **options).generate(PROMPT).statistics.reuse_rate == 0.0
    greedy = {**options, "sampling": {"temperature": 0.0}}
    assert pipeline(**greedy).generate(PROMPT).statistics.reuse_rate == 0.0
    assert pipeline(leftover=True, **greedy).generate(PROMPT).statistics.reuse_rate > 0.0


# --- the end of a step ----------------------------------------------------------------------------


def test_a_pass_at_the_end_is_a_side_call_of_the_dearest_that_acted() -> None:
    made = pipeline(graft={"kind": "treegraft", "rescore": "once"}, scheduler=fixed("far", "ngram"))
    result = made.generate(PROMPT, max_new_tokens=20)
    assert result.tokens == plain(20)
    assert counts(result)[0] == ((1, 0), (0, 1, 0))
    never = pipeline(graft={"kind": "treegraft", "rescore": "once"})
    assert never.generate(PROMPT, max_new_tokens=20).statistics.side_calls == (0, 0, 0)


def test_a_drafter_whose_context_is_full_is_not_called_at_the_end() -> None:
    short = mixed_model(TARGET, hashed_model(V, seed=2), 0.2)
    short.max_positions = len(PROMPT)
    config = {
        "target": {"model": "target"},
        "drafters": [NGRAM, {"kind": "lm", "model": "short"}],
        "graft": {"kind": "treegraft", "rescore": "once"},
        "builder": {"kind": "layered", "depth": 2, "width": 3, "budget": 12},
        "scheduler": fixed("short"),
    }
    made = build_pipeline(parse_config(config), models={"target": TARGET, "short": short})
    result = made.generate(PROMPT, max_new_tokens=10)
    assert result.tokens == plain(10)
    # It had room for the text, and has none for the tree that it drafted.
    assert counts(result)[0] == ((1,), (0, 0))


class Ending(GraftPolicy):
    """Does nothing in a layer and answers ``answer`` at the end."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Any, width: int
    ) -> Touched:
        return Touched(frontier[:0], frontier[:0])

    def finish(self, *_: Any) -> Any:
        if self.answer == "raise":
            raise KeyError("nothing")
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            None,
            "the graft's finish must return numbers of the drafters that it called, of [0, 1, 2]",
        ),
        (
            [3],
            "the graft's finish must return numbers of the drafters that it called, of [0, 1, 2]",
        ),
        ("raise", "graft 'Ending' failed in finish: KeyError: 'nothing'"),
    ],
)
def test_an_end_that_goes_wrong_is_one_line(answer: Any, message: str) -> None:
    made = pipeline(graft={"kind": "test_graft_pipelines:Ending", "params": {"answer": answer}})
    with pytest.raises(PolicyError) as caught:
        made.generate(PROMPT)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_budget_swap_fills_a_models_tree_with_look_ups() -> None:
    made = pipeline(graft={"kind": "budget_swap", "swap": 6}, scheduler={"kind": "always"})
    result = made.generate(PROMPT, max_new_tokens=30)
    assert result.tokens == plain(30)
    assert result.statistics.kept[0] > 0
    assert result.statistics.side_calls[0] > 0
    assert all(step.n_tree <= 13 for step in result.steps)


def test_replace_leaves_nothing_of_what_look_ups_drafted_before() -> None:
    made = pipeline(graft={"kind": "replace"}, scheduler=fixed("ngram", "ngram", "near"))
    result = made.generate(PROMPT, max_new_tokens=30)
    assert result.tokens == plain(30)
    assert result.statistics.drafted[0] > 0
    assert result.statistics.kept[0] == 0
    assert result.statistics.accepted[2] > 0


def test_a_model_does_not_read_what_was_thrown_away() -> None:
    reads = {}
    for kind, calls in (("replace", ("ngram", "near")), ("treegraft", ("near",))):
        near = mixed_model(TARGET, hashed_model(V, seed=2), 0.3)
        config = {
            "target": {"model": "target"},
            "drafters": [NGRAM, NEAR],
            "graft": {"kind": kind},
            "scheduler": fixed(*calls),
        }
        made = build_pipeline(parse_config(config), models={"target": TARGET, "near": near})
        first = next(made.stream(PROMPT)).step
        reads[kind] = near.reads
        assert first.drafted[0] > 0 or kind == "treegraft"
    assert reads["replace"] == reads["treegraft"]


# --- law 1 ----------------------------------------------------------------------------------------

GRAFTS = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.just("treegraft"),
            "rescore": st.sampled_from(["every_visit", "once", "never"]),
            "recover": st.booleans(),
            "reach": st.sampled_from(["frontier", "any"]),
            "lookback": st.integers(0, 3),
            "revisit": st.booleans(),
        }
    ),
    st.fixed_dictionaries(
        {"kind": st.just("budget_swap"), "swap": st.integers(1, 9), "revisit": st.booleans()}
    ),
    st.fixed_dictionaries({"kind": st.just("replace"), "lookback": st.integers(0, 3)}),
)
FRONTIER_GRAFTS = st.one_of(
    st.just({"kind": "union"}),
    st.fixed_dictionaries(
        {
            "kind": st.just("treegraft"),
            "reselect": st.just(False),
            "recover": st.booleans(),
            "rescore": st.sampled_from(["every_visit", "once", "never"]),
        }
    ),
)
BUILDERS = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["layered", "best_first"]),
            "depth": st.integers(0, 4),
            "width": st.integers(1, 4),
            "budget": st.integers(0, 12),
        }
    ),
    st.fixed_dictionaries({"kind": st.just("chain"), "depth": st.integers(0, 4)}),
)
STATIC = st.sampled_from(
    [[[0]], [[0], [1], [0, 0]], [[1], [1, 0], [1, 0, 1]], [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]]
).map(lambda paths: {"kind": "static", "paths": paths})
DRAFTERS = st.lists(
    st.sampled_from([NGRAM, FAR, NEAR, {"kind": "ngram", "name": "second", "length": 6}]),
    min_size=1,
    max_size=4,
    unique_by=str,
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        shape, graft = draw(BUILDERS), draw(st.one_of(GRAFTS, FRONTIER_GRAFTS))
    else:
        shape, graft = draw(STATIC), draw(FRONTIER_GRAFTS)
    drafters = draw(DRAFTERS)
    numbers = st.integers(0, len(drafters) - 1)
    depth = max(map(len, shape["paths"])) if "paths" in shape else shape["depth"]
    lookups = [d.get("name", "ngram") for d in drafters if d["kind"] == "ngram"]
    scheduler: dict[str, Any] = {"kind": "always"}
    if depth:
        calls = draw(st.lists(numbers, min_size=1, max_size=depth))
        scheduler = {"kind": "fixed", "calls": calls}
    riders = [] if graft["kind"] == "replace" else [n for n in lookups if draw(st.booleans())]
    return {
        "target": {"model": "target"},
        "drafters": drafters,
        "builder": shape,
        "graft": graft,
        "scheduler": scheduler,
        "ride_along": riders,
        "leftover": draw(st.booleans()),
        "sampling": {"temperature": draw(st.sampled_from([0.0, 0.9])), "seed": draw(numbers)},
        "verifier": {"kind": draw(st.sampled_from(["walk", "ledger"]))},
        "stop": {"max_new_tokens": draw(st.integers(1, 24))},
    }


def check_law_1(data: dict[str, Any]) -> None:
    """Tokens are plain decoding's; both trees draft, keep and accept the same; counts add up."""
    records = []
    for kind in ("tensor", "reference"):
        made = build_pipeline(parse_config({**data, "backend": {"kind": kind}}), models=MODELS)
        result = made.generate(PROMPT)
        assert result.tokens == plain(data["stop"]["max_new_tokens"], **data["sampling"])
        budget = made._parts.builder.budget
        for step in result.steps:
            assert step.n_tree <= budget + 1
            assert sum(step.kept) == step.n_tree - 1
            assert len(step.side_calls) == len(data["drafters"])
        records.append(
            [
                (s.n_new, s.n_tree, s.calls, s.side_calls, s.reused, s.drafted, s.kept, s.accepted)
                for s in result.steps
            ]
        )
    assert records[0] == records[1]


@given(data=configs())
@settings(max_examples=max(60, settings.default.max_examples))
def test_no_graft_builder_or_rider_changes_a_token(data: dict[str, Any]) -> None:
    check_law_1(data)


@pytest.mark.slow
@given(data=configs())
@settings(settings.get_profile("thorough"))
def test_no_graft_builder_or_rider_changes_a_token_thoroughly(data: dict[str, Any]) -> None:
    check_law_1(data)


@pytest.mark.parametrize("children", ["sample", "topk_plus_one_sample"])
@pytest.mark.parametrize(
    ("graft", "builder"),
    [
        ({"kind": "replace"}, {"kind": "layered", "depth": 3, "width": 2, "budget": 6}),
        ({"kind": "budget_swap", "swap": 3}, {"kind": "best_first", "width": 2, "budget": 6}),
        ({"kind": "union"}, {"kind": "static", "paths": [[0], [1], [0, 0], [0, 1]]}),
        ({"kind": "treegraft", "reach": "any"}, {"kind": "chain", "depth": 3}),
    ],
)
def test_drawn_trees_of_every_kind_keep_their_draws_and_a_seed_its_text(
    graft: dict[str, Any], builder: dict[str, Any], children: str
) -> None:
    """The pruned tree's ledger is checked against the draws in every step (decoding._check)."""
    texts = []
    for backend in ("tensor", "reference"):
        made = pipeline(
            drafters=[NGRAM, {**NEAR, "children": children}],
            graft=graft,
            builder=builder,
            scheduler=fixed("ngram", "near"),
            ride_along=[] if graft["kind"] == "replace" else ["ngram"],
            verifier={"kind": "traversal"},
            sampling={"temperature": 1.0},
            backend={"kind": backend},
        )
        texts.append([made.generate(PROMPT, max_new_tokens=20, seed=s).tokens for s in (1, 2)])
    assert texts[0] == texts[1]


def test_riders_do_not_push_a_model_past_its_context_limit() -> None:
    """They act first, and their paths may take the room that the layer's drafter had left."""
    target = looping_model([1, 2, 3, 4], 5)
    brief = replace(target, name="brief", max_positions=12)
    config = {
        "target": {"model": "target"},
        "drafters": [{"kind": "ngram", "length": 9}, {"kind": "lm", "model": "brief"}],
        "ride_along": ["ngram"],
        "graft": {"kind": "treegraft", "reach": "any"},
        "scheduler": {"kind": "always"},
        "stop": {"max_new_tokens": 30},
    }
    made = build_pipeline(parse_config(config), models={"target": target, "brief": brief})
    result = made.generate([1, 2, 3, 4, 1, 2])
    assert result.tokens == [[3, 4, 1, 2][i % 4] for i in range(30)]
    assert [notice for notice in result.notices if "'brief'" in notice] == list(result.notices)
    assert len(result.notices) == 1


def test_a_layer_after_a_model_that_replaced_the_tree_with_nothing_drafts_from_the_root() -> None:
    """Its frontier was taken out with all else; the next look-up was told to draft under it."""
    own = "adversarial_drafters:"
    made = pipeline(
        drafters=[
            {"kind": own + "Scripted", "name": "sure", "params": {"paths": [[7, 7]]}},
            {"kind": own + "ScriptedScorer", "name": "mute", "params": {"paths": [], "score": -1}},
        ],
        graft={"kind": "replace"},
        builder={"kind": "layered", "depth": 3, "width": 2, "budget": 12},
        scheduler=fixed("sure", "mute", "sure"),
    )
    first = next(made.stream(PROMPT))
    assert [layer.frontier.tolist() for layer in first.layers] == [[0], [1], [0]]
    assert made.generate(PROMPT, max_new_tokens=20).tokens == plain(20)


class Everything(TreeBuilder):
    """Hands on every node that there ever was, also those that a graft took out."""

    depth, width, budget = 3, 3, 12

    def prune(self, tree: TreeBackend) -> TokenTree:
        return tree.prune(self.budget)

    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> Any:
        return torch.arange(tree.n_nodes)


def test_a_builder_that_hands_on_what_was_taken_out_is_not_followed_there() -> None:
    own = "adversarial_drafters:"
    made = pipeline(
        drafters=[
            {"kind": own + "Scripted", "name": "sure", "params": {"paths": [[7, 7]]}},
            {"kind": own + "ScriptedScorer", "name": "mute", "params": {"paths": [], "score": -1}},
        ],
        graft={"kind": "replace"},
        builder={"kind": "test_graft_pipelines:Everything"},
        scheduler=fixed("sure", "mute", "sure"),
    )
    first = next(made.stream(PROMPT))
    assert first.layers[-1].frontier.tolist() == [0]
    assert made.generate(PROMPT, max_new_tokens=20).tokens == plain(20)
