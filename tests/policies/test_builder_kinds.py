"""Best first, chain and static: what each layer expands, when it is enough, what is read."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_models import hashed_model, mixed_model
from test_treegraft_graft import Lookup, Scorer, lm

from treegraft.backends.reference import ReferenceTree
from treegraft.backends.tensor_tree import TensorTree
from treegraft.components import build_component
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError
from treegraft.core.roles import Drafter, GraftPolicy, Touched, TreeBackend, TreeBuilder
from treegraft.core.tree import ROOT, Proposals, TokenTree
from treegraft.policies.builders import (
    BestFirstBuilder,
    BestFirstConfig,
    ChainBuilder,
    ChainConfig,
    StaticBuilder,
    StaticConfig,
)
from treegraft.policies.grafts import TreegraftConfig, TreegraftGraft, UnionConfig, UnionGraft

V = 6
NONE = -float("inf")
UNION = UnionGraft(UnionConfig())
TABLE = (-0.7, -1.4, -2.1, -3.0, -9.0, -9.0)


@pytest.fixture(params=[TensorTree, ReferenceTree], ids=["tensor", "reference"])
def tree(request: pytest.FixtureRequest) -> TreeBackend:
    made: TreeBackend = request.param(V)
    made.reset_(token=0, max_depth=9)
    return made


def grow(
    tree: TreeBackend,
    builder: TreeBuilder,
    drafters: Sequence[Drafter],
    graft: GraftPolicy = UNION,
) -> tuple[list[list[list[int]]], TokenTree]:
    """Layer by layer as decoding does; the paths of each layer's frontier, and the pruned tree."""
    frontier, expanded = torch.tensor([ROOT]), []
    for layer in range(1, builder.depth + 1):
        expanded.append([tree.path(node) for node in frontier.tolist()])
        index = (layer - 1) % len(drafters)
        touched = graft.visit(tree, drafters[index], index, frontier, builder.width)
        reached = builder.frontier(tree, touched, layer)
        if reached is None:
            break
        frontier = reached if len(reached) else frontier
    pruned = builder.prune(tree)
    pruned.check()
    return expanded, pruned


def paths(tree: TokenTree) -> list[list[int]]:
    return [tree.path(i) for i in range(1, len(tree))]


# --- best first -----------------------------------------------------------------------------------


def test_best_first_goes_where_the_path_is_likeliest(tree: TreeBackend) -> None:
    """[0] at -0.7, then [0, 0] and [1] at -1.4: leaves of different depth share a layer."""
    builder = BestFirstBuilder(BestFirstConfig(depth=3, width=2, budget=20))
    expanded, pruned = grow(tree, builder, [Scorer(*TABLE)])
    assert expanded == [[[]], [[0], [1]], [[0, 0], [0, 1]]]
    assert sorted(paths(pruned)) == sorted(
        [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
    )


def test_best_first_stops_when_nothing_can_enter_the_best(tree: TreeBackend) -> None:
    builder = BestFirstBuilder(BestFirstConfig(depth=9, width=2, budget=2))
    expanded, pruned = grow(tree, builder, [Scorer(*TABLE)])
    # After [0, 0] the second best scores -1.4, and so do the best leaves: no child can beat it.
    assert expanded == [[[]], [[0]]]
    assert paths(pruned) == [[0], [1]]
    # A leaf that equals the last node that is kept brings nothing: older nodes go first.
    tree.reset_(0, 9)
    certain = Scorer(0.0, *[NONE] * (V - 1))
    expanded, pruned = grow(
        tree, BestFirstBuilder(BestFirstConfig(depth=9, width=1, budget=3)), [certain]
    )
    assert expanded == [[[]], [[0]], [[0, 0]]]
    assert paths(pruned) == [[0], [0, 0], [0, 0, 0]]


def test_best_first_without_budget_ends_after_one_layer(tree: TreeBackend) -> None:
    expanded, pruned = grow(
        tree, BestFirstBuilder(BestFirstConfig(depth=3, width=2, budget=0)), [Scorer(*TABLE)]
    )
    assert len(expanded) == 1
    assert len(pruned) == 1


def test_best_first_keeps_a_leaf_that_a_drafter_had_nothing_for(tree: TreeBackend) -> None:
    builder = BestFirstBuilder(BestFirstConfig(depth=3, width=1, budget=9))
    expanded, _ = grow(tree, builder, [Scorer(*TABLE), Lookup(), Scorer(*TABLE)])
    assert expanded == [[[]], [[0]], [[0]]]


@given(seed=st.integers(0, 20), width=st.integers(1, 4), budget=st.integers(0, 12))
def test_best_first_with_layers_to_spare_reads_the_likeliest_paths_there_are(
    seed: int, width: int, budget: int
) -> None:
    """With a width of all ids the tree holds the B likeliest paths of the whole language."""
    model = hashed_model(V, seed=seed)
    tree = TensorTree(V)
    tree.reset_(2, 30)
    builder = BestFirstBuilder(BestFirstConfig(depth=64, width=V, budget=budget))
    _, pruned = grow(tree, builder, [lm(model)])
    assert len(pruned) == budget + 1
    # The best paths by exhaustion: a heap over everything that can follow.
    heap: list[tuple[float, list[int]]] = [(0.0, [])]
    expected: list[float] = []
    while len(expected) < budget + 1:
        cost, path = heapq.heappop(heap)
        expected.append(-cost)
        own = model.logits([1, 2, *path]).log_softmax(-1)
        for token in range(V):
            heapq.heappush(heap, (cost - float(own[token]), [*path, token]))
    found = sorted(pruned.logprob.tolist(), reverse=True)
    assert found == pytest.approx(expected, abs=1e-4)


# --- chain ----------------------------------------------------------------------------------------


def test_a_chain_grows_at_its_end(tree: TreeBackend) -> None:
    expanded, pruned = grow(tree, ChainBuilder(ChainConfig(depth=3)), [Scorer(*TABLE)])
    assert expanded == [[[]], [[0]], [[0, 0]]]
    assert paths(pruned) == [[0], [0, 0], [0, 0, 0]]


def test_a_chain_goes_on_from_the_end_of_a_look_ups_path(tree: TreeBackend) -> None:
    expanded, pruned = grow(
        tree, ChainBuilder(ChainConfig(depth=5)), [Lookup([3, 4]), Scorer(*TABLE)]
    )
    assert expanded == [[[]], [[3, 4]], [[3, 4, 0]]]  # then it has 5 tokens
    assert paths(pruned)[-1] == [3, 4, 0, 3, 4]
    assert len(pruned) == 6


def test_a_chain_is_cut_to_its_depth(tree: TreeBackend) -> None:
    expanded, pruned = grow(tree, ChainBuilder(ChainConfig(depth=2)), [Lookup([3, 4, 5])])
    assert expanded == [[[]]]
    assert paths(pruned) == [[3], [3, 4]]


def test_a_chain_waits_at_its_end_for_somebody_who_knows_more(tree: TreeBackend) -> None:
    expanded, _ = grow(
        tree, ChainBuilder(ChainConfig(depth=4)), [Scorer(*TABLE), Lookup(), Scorer(*TABLE)]
    )
    assert expanded == [[[]], [[0]], [[0]], [[0, 0]]]


def test_under_a_graft_that_reselects_the_best_of_a_branched_chain_is_read(
    tree: TreeBackend,
) -> None:
    builder = ChainBuilder(ChainConfig(depth=3))
    graft = TreegraftGraft(TreegraftConfig())
    _, pruned = grow(tree, builder, [Lookup([5, 5]), Scorer(*TABLE)], graft)
    assert paths(pruned)[0] == [5]
    assert [0] in paths(pruned)  # the root was the scorer's best position
    assert len(pruned) == 4


# --- static ---------------------------------------------------------------------------------------

SHAPE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


def test_a_static_tree_has_exactly_its_paths(tree: TreeBackend) -> None:
    """The table ranks 0, 1, 2, ...: ranks and tokens are one, and [1, 0] beats nothing."""
    builder = StaticBuilder(StaticConfig(paths=SHAPE))
    assert (builder.depth, builder.width, builder.budget) == (3, 2, 6)
    expanded, pruned = grow(tree, builder, [Scorer(*TABLE)])
    assert expanded == [[[]], [[0], [1]], [[0, 0]]]
    assert sorted(paths(pruned)) == sorted(map(list, SHAPE))


def test_ranks_and_not_scores_say_what_is_read(tree: TreeBackend) -> None:
    """The second child of the root is read although three others score higher."""
    builder = StaticBuilder(StaticConfig(paths=((1,), (1, 2))))
    expanded, pruned = grow(tree, builder, [Scorer(*TABLE)])
    assert expanded == [[[]], [[1]]]
    assert paths(pruned) == [[1], [1, 2]]


def test_a_static_tree_takes_what_the_drafter_has(tree: TreeBackend) -> None:
    builder = StaticBuilder(StaticConfig(paths=SHAPE))
    expanded, pruned = grow(tree, builder, [Lookup([3, 4]), Lookup(), Scorer(*TABLE)])
    # One path of two tokens: its nodes are the first children; [3, 4] is a leaf with a child to be.
    assert expanded == [[[]], [[3, 4]], [[3, 4]]]
    assert paths(pruned) == [[3], [3, 4], [3, 4, 0]]


def test_a_static_tree_is_complete_before_its_last_layer(tree: TreeBackend) -> None:
    builder = StaticBuilder(StaticConfig(paths=((0,), (0, 0), (0, 0, 0))))
    expanded, _ = grow(tree, builder, [Lookup([3, 4, 5])])
    assert expanded == [[[]]]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([], "1 or more entries are needed, found 0"),
        ([[]], "paths must have 1 to 64 ranks, found []"),
        ([[0] * 65], "paths must have 1 to 64 ranks"),
        ([[0], [0, 64]], "paths must hold ranks 0 to 63, found [0, 64]"),
        ([[-1]], "paths must hold ranks 0 to 63, found [-1]"),
        ([[0], [1, 0]], "paths must hold the parent of each, found [1, 0] without one"),
        ([[0], [1], [0]], "paths must differ, found [0] twice"),
    ],
)
def test_a_shape_that_is_no_tree_is_refused(shape: list[list[int]], message: str) -> None:
    builder = {"kind": "static", "paths": shape}
    with pytest.raises(ConfigError) as caught:
        parse_config({"target": {"model": "t"}, "builder": builder, "graft": {"kind": "union"}})
    assert str(caught.value).startswith("builder")
    assert message in str(caught.value)


def test_shapes_need_not_be_in_order(tree: TreeBackend) -> None:
    builder = StaticBuilder(StaticConfig(paths=SHAPE[::-1]))
    _, pruned = grow(tree, builder, [Scorer(*TABLE)])
    assert sorted(paths(pruned)) == sorted(map(list, SHAPE))


# --- configs --------------------------------------------------------------------------------------


def config(**options: Any) -> dict[str, Any]:
    return {"target": {"model": "t"}, "drafters": [{"kind": "ngram"}], **options}


@pytest.mark.parametrize(
    ("graft", "found"),
    [
        ({"kind": "treegraft"}, "found reselect true"),
        ({"kind": "replace"}, "found 'replace'"),
        ({"kind": "budget_swap"}, "found 'budget_swap'"),
    ],
)
def test_a_static_tree_and_a_graft_that_goes_elsewhere_are_refused(
    graft: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(config(builder={"kind": "static", "paths": [[0]]}, graft=graft))
    message = str(caught.value)
    assert message.startswith("builder.kind 'static' needs a graft that expands the frontier: ")
    assert message.endswith(found)


@pytest.mark.parametrize(
    "builder",
    [
        {"kind": "chain", "depth": 2},
        {"kind": "best_first", "depth": 2},
        {"kind": "static", "paths": [[0], [0, 0]]},
    ],
)
def test_a_schedule_longer_than_the_tree_is_refused(builder: dict[str, Any]) -> None:
    scheduler = {"kind": "fixed", "calls": [0, 0, 0]}
    with pytest.raises(ConfigError, match=r"at most builder.depth = 2 layers, found 3"):
        parse_config(config(builder=builder, scheduler=scheduler, graft={"kind": "union"}))


# --- the laws -------------------------------------------------------------------------------------

BUILDERS = st.one_of(
    st.builds(BestFirstConfig, depth=st.integers(0, 5), width=st.integers(1, 3)).map(
        lambda made: made.model_copy(update={"budget": made.depth})
    ),
    st.builds(ChainConfig, depth=st.integers(0, 5)),
    st.sampled_from([SHAPE, ((1,), (1, 2)), ((0,), (1,), (2,))]).map(
        lambda shape: StaticConfig(paths=shape)
    ),
)


@given(builder=BUILDERS, seed=st.integers(0, 9), unions=st.booleans(), length=st.integers(0, 3))
def test_both_trees_agree_under_every_builder(
    builder: Any, seed: int, unions: bool, length: int
) -> None:
    graft = UNION if unions else TreegraftGraft(TreegraftConfig(reselect=False))
    near = mixed_model(hashed_model(V, seed=seed), hashed_model(V, seed=77), 0.4)
    made = []
    for tree in (TensorTree(V), ReferenceTree(V)):
        tree.reset_(2, 4)
        drafters = [lm(hashed_model(V, seed=seed)), Lookup([1, 2, 3][:length] or [9]), lm(near)]
        made.append(grow(tree, build_component("builder", builder), drafters, graft))
    assert made[0][0] == made[1][0]
    assert torch.equal(made[0][1].node, made[1][1].node)
    assert torch.equal(made[0][1].logprob, made[1][1].logprob)
    if isinstance(builder, StaticConfig):
        assert len(made[0][1]) <= len(builder.paths) + 1


def test_a_layer_that_touched_nothing_leaves_every_builder_its_frontier(tree: TreeBackend) -> None:
    nothing = Touched(torch.tensor([-1]), torch.tensor([0]))
    tree.add_(Proposals.empty(), 0, False)
    chain = ChainBuilder(ChainConfig(depth=2)).frontier(tree, nothing, 1)
    assert chain is not None
    assert chain.tolist() == []
    for builder in (
        StaticBuilder(StaticConfig(paths=((0,),))),
        BestFirstBuilder(BestFirstConfig()),
    ):
        reached = builder.frontier(tree, nothing, 1)
        assert reached is not None
        assert reached.tolist() == [ROOT]
