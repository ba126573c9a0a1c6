"""The working tree: a story for both implementations, and what is refused.

Laws: docs/ and core/tree.py. ``test_tree_machine.py`` compares the two operation by operation.
"""

from __future__ import annotations

import math

import pytest
import torch

from treegraft.backends.reference import ReferenceTree
from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.errors import TreeError
from treegraft.core.roles import TreeBackend
from treegraft.core.tree import NOBODY, ROOT, Proposals, TokenTree

V = 5
NONE = -math.inf
COLUMNS = ("token", "parent", "depth", "logprob", "source", "scorer", "proposers")


@pytest.fixture(params=[TensorTree, ReferenceTree], ids=["tensor", "reference"])
def tree(request: pytest.FixtureRequest) -> TreeBackend:
    made: TreeBackend = request.param(V)
    made.reset_(token=4, max_depth=3)
    return made


def paths(*entries: tuple[int, list[int], list[float]]) -> Proposals:
    positions, tokens, scores = zip(*entries, strict=True)
    return Proposals.of_paths(positions, tokens, scores)


# --- the story ------------------------------------------------------------------------------------


def test_a_fresh_tree_is_its_root(tree: TreeBackend) -> None:
    assert tree.n_nodes == 1
    assert tree.token.tolist() == [4]
    assert tree.parent.tolist() == [ROOT]
    assert tree.depth.tolist() == [0]
    assert tree.logprob.tolist() == [0.0]
    assert tree.source.tolist() == tree.scorer.tolist() == [NOBODY]
    assert tree.path(ROOT) == []
    tree.prune(7).check()


def test_paths_with_a_common_start_share_nodes(tree: TreeBackend) -> None:
    nodes = tree.add_(
        paths((ROOT, [1, 2], [-1.0, NONE]), (ROOT, [1, 3], [-0.5, -2.0])), source=0, overwrite=False
    )
    assert nodes.tolist() == [[1, 2], [1, 3]]
    assert tree.path(3) == [1, 3]
    # Of two scores in one call the higher one counts.
    assert tree.logprob.tolist() == [0.0, -0.5, NONE, -2.5]
    assert tree.scorer.tolist() == [NOBODY, 0, NOBODY, 0]


def test_a_lookup_fills_in_scores_and_a_scorer_replaces_them(tree: TreeBackend) -> None:
    tree.add_(paths((ROOT, [1, 2], [-1.0, NONE])), source=0, overwrite=False)
    tree.add_(paths((ROOT, [1], [-9.0]), (1, [2], [-0.5])), source=1, overwrite=False)
    assert tree.logprob.tolist() == [0.0, -1.0, -1.5]
    assert tree.source.tolist() == [NOBODY, 0, 0]
    assert tree.scorer.tolist() == [NOBODY, 0, 1]
    tree.add_(paths((ROOT, [1], [-2.0])), source=2, overwrite=True)
    assert tree.logprob.tolist() == [0.0, -2.0, -2.5]
    assert tree.source.tolist() == [NOBODY, 0, 0]
    assert tree.scorer.tolist() == [NOBODY, 2, 1]


def test_a_node_knows_everyone_who_proposed_it(tree: TreeBackend) -> None:
    tree.add_(paths((ROOT, [1, 2], [-1.0, NONE])), source=0, overwrite=False)
    tree.add_(paths((ROOT, [1], [-9.0]), (ROOT, [3], [-9.0])), source=2, overwrite=True)
    assert tree.source.tolist() == [NOBODY, 0, 0, 2]
    assert tree.proposers.tolist() == [0, 0b101, 0b001, 0b100]
    # To score a node is not to propose it, and to propose it again changes nothing.
    tree.rescore_(torch.full((4,), -1.0), source=5)
    tree.add_(paths((ROOT, [1, 2], [-1.0, NONE])), source=0, overwrite=False)
    tree.add_(paths((1, [2], [-1.0])), source=62, overwrite=False)
    assert tree.proposers.tolist() == [0, 0b101, 1 | 1 << 62, 0b100]
    assert tree.prune(2).proposers.tolist() == [0, 0b101, 0b100]
    tree.reset_(token=0, max_depth=1)
    tree.add_(paths((ROOT, [1], [-1.0])), source=3, overwrite=False)
    assert tree.proposers.tolist() == [0, 0b1000]


def test_a_token_outside_the_vocabulary_ends_its_path(tree: TreeBackend) -> None:
    nodes = tree.add_(
        paths((ROOT, [1, V, 2], [-1.0] * 3), (ROOT, [-1], [-1.0]), (ROOT, [2**40], [-1.0])),
        source=0,
        overwrite=False,
    )
    assert nodes.tolist() == [[1, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert tree.n_nodes == 2


def test_a_path_ends_at_the_deepest_layer(tree: TreeBackend) -> None:
    nodes = tree.add_(paths((ROOT, [0, 1, 2, 3, 0], [-1.0] * 5)), source=0, overwrite=False)
    assert nodes.tolist() == [[1, 2, 3, -1, -1]]
    assert tree.add_(paths((3, [1], [-1.0])), source=0, overwrite=False).tolist() == [[-1]]


def test_nan_is_no_score_and_nothing_is_likelier_than_certain(tree: TreeBackend) -> None:
    tree.add_(paths((ROOT, [1], [math.nan]), (ROOT, [2], [3.0]), (ROOT, [3], [math.inf])), 0, True)
    assert tree.logprob.tolist() == [0.0, NONE, 0.0, 0.0]
    tree.rescore_(torch.tensor([5.0, 0.5, math.nan, -1.0]), 1)
    assert tree.logprob.tolist() == [0.0, 0.0, NONE, -1.0]
    assert tree.scorer.tolist() == [NOBODY, 1, 1, 1]


def test_a_score_that_float32_cannot_hold_is_none(tree: TreeBackend) -> None:
    """Both trees count in float32; the reference took such a score for one and kept its scorer."""
    root, token = torch.tensor([ROOT]), torch.tensor([[1]])
    huge = torch.tensor([[-1e300]], dtype=torch.float64)
    tree.add_(Proposals(root, token, huge, root), source=2, overwrite=False)
    assert tree.logprob.tolist() == [0.0, NONE]
    assert tree.scorer.tolist() == [NOBODY, NOBODY]
    tree.add_(paths((ROOT, [1], [-1.0])), source=3, overwrite=False)
    assert tree.scorer.tolist() == [NOBODY, 3]


def test_rescoring_changes_every_sum_below(tree: TreeBackend) -> None:
    tree.add_(paths((ROOT, [1, 2, 3], [-1.0, -1.0, -1.0])), source=0, overwrite=False)
    tree.rescore_(torch.tensor([0.0, -4.0, -0.5, -0.25]), source=1)
    assert tree.logprob.tolist() == [0.0, -4.0, -4.5, -4.75]


def test_equal_scores_are_ranked_by_age(tree: TreeBackend) -> None:
    tree.add_(paths(*((ROOT, [token], [-1.0]) for token in (3, 1, 2))), source=0, overwrite=False)
    assert tree.best(2, 1, 1).tolist() == [1, 2]
    assert tree.best(9, 0, 5).tolist() == [0, 1, 2, 3]
    assert tree.rank(torch.tensor([3, 2, 3, 1]), torch.tensor([0, 0, 0, 0]), 9).tolist() == [
        1,
        2,
        3,
    ]
    # A longer match goes first, and a node counts with its longest one.
    assert tree.rank(torch.tensor([3, 2, 3, 1]), torch.tensor([1, 2, 3, 1]), 2).tolist() == [3, 2]


def test_a_position_that_a_drafter_expanded_can_be_left_out(tree: TreeBackend) -> None:
    tree.add_(paths((ROOT, [1, 2], [-1.0, -1.0])), source=0, overwrite=False)
    tree.add_(paths((1, [3], [-0.5])), source=1, overwrite=False)
    assert tree.best(9, 0, 9).tolist() == [0, 1, 3, 2]
    # Drafter 0 hung its path under the root; the node on the way was no position of its.
    assert tree.best(9, 0, 9, unvisited_by=0).tolist() == [1, 3, 2]
    assert tree.best(9, 0, 9, unvisited_by=1).tolist() == [0, 3, 2]
    assert tree.best(9, 0, 9, unvisited_by=62).tolist() == [0, 1, 3, 2]
    tree.reset_(token=0, max_depth=3)
    assert tree.best(9, 0, 9, unvisited_by=0).tolist() == [0]
    tree.add_(paths((ROOT, [1], [-1.0])), source=3, overwrite=False)
    assert tree.best(9, 0, 9, unvisited_by=1).tolist() == [0, 1]


def test_reset_forgets_everything(tree: TreeBackend) -> None:
    tree.add_(paths((ROOT, [1, 2], [-1.0, -1.0])), source=3, overwrite=True)
    tree.reset_(token=0, max_depth=1)
    assert tree.n_nodes == 1
    assert tree.add_(paths((ROOT, [1, 2], [-2.0, -1.0])), 0, False).tolist() == [[1, -1]]
    assert tree.logprob.tolist() == [0.0, -2.0]
    assert tree.ancestors(torch.tensor([1])).tolist() == [[True, True]]


def test_pruning_to_nothing_leaves_the_root(tree: TreeBackend) -> None:
    tree.add_(paths((ROOT, [1, 2], [0.0, 0.0])), source=0, overwrite=False)
    pruned = tree.prune(0)
    pruned.check()
    assert len(pruned) == 1
    assert pruned.node.tolist() == [ROOT]


def test_no_proposals_change_nothing(tree: TreeBackend) -> None:
    assert tree.add_(Proposals.empty(), source=0, overwrite=True).shape == (0, 1)
    assert tree.n_nodes == 1


# --- what is refused ------------------------------------------------------------------------------


def test_token_tree_check_names_the_law(tree: TreeBackend) -> None:
    tree.add_(paths((ROOT, [1, 2], [-1.0, -1.0]), (ROOT, [3], [-5.0])), 0, False)
    good = tree.prune(9)
    fields = {name: getattr(good, name) for name in (*COLUMNS, "ancestors", "node")}

    def changed(name: str, index: object, value: object) -> TokenTree:
        column = fields[name].clone()
        column[index] = value
        return TokenTree(**{**fields, name: column})

    good.check()
    for broken, law in (
        (changed("logprob", 0, -1.0), "node 0 is the root"),
        (changed("parent", 1, 3), r"parent\[i\] < i"),
        (changed("depth", 2, 5), r"depth\[i\] = depth\[parent\[i\]\] \+ 1"),
        (changed("logprob", 3, -0.5), r"logprob\[i\] <= logprob\[parent\[i\]\]"),
        (changed("proposers", 2, 0b10), "a node's source is among its proposers"),
        (changed("token", 2, 1), "siblings have different tokens"),
        (changed("ancestors", (1, 0), False), "ancestors are the path to the root"),
    ):
        with pytest.raises(TreeError, match=f"draft tree breaks the law: {law}"):
            broken.check()


def proposals(**changed: torch.Tensor) -> Proposals:
    fields = {
        "positions": torch.tensor([0, 1]),
        "tokens": torch.tensor([[1], [2]]),
        "logprobs": torch.tensor([[-1.0], [-1.0]]),
        "match": torch.tensor([0, 0]),
    }
    return Proposals(**{**fields, **changed})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (proposals(match=torch.tensor([0])), "need match of shape [2], found [1]"),
        (proposals(match=torch.tensor([0, -1])), "match must be 0 or more, found -1"),
        (
            proposals(match=torch.tensor([0.0, 1.0])),
            "need match of type int64, found torch.float32",
        ),
        (proposals(positions=torch.tensor([0, 2])), "must be nodes 0..1, found [0, 2]"),
        (proposals(positions=torch.tensor([-1, 0])), "must be nodes 0..1, found [-1, 0]"),
        (proposals(positions=torch.tensor([[0, 1]])), "need positions of shape [K], found [1, 2]"),
        (
            proposals(tokens=torch.tensor([[1, 2], [1, 2]])),
            "need tokens and logprobs of shape [2, C], found [2, 2] and [2, 1]",
        ),
        (
            proposals(tokens=torch.tensor([1, 2]), logprobs=torch.tensor([-1.0, -1.0])),
            "need tokens and logprobs of shape [2, C], found [2] and [2]",
        ),
        (
            proposals(tokens=torch.empty(2, 0, dtype=torch.int64), logprobs=torch.empty(2, 0)),
            "need at least one column of tokens, found [2, 0]",
        ),
        (
            proposals(tokens=torch.tensor([[1.0], [2.0]])),
            "need tokens of type int64, found torch.float32",
        ),
        (
            proposals(logprobs=torch.tensor([[-1], [-1]])),
            "need logprobs of a float type, found torch.int64",
        ),
    ],
)
def test_proposals_of_a_wrong_form_are_refused(wrong: Proposals, message: str) -> None:
    with pytest.raises(TreeError) as caught:
        wrong.check(n_nodes=2)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_empty_paths_make_proposals_that_add_nothing(tree: TreeBackend) -> None:
    empty = Proposals.of_paths([0, 0], [[], []], [[], []])
    empty.check(tree.n_nodes)
    assert tree.add_(empty, 0, True).tolist() == [[-1], [-1]]
    assert tree.n_nodes == 1
