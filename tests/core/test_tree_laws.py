"""The working tree: a story for both implementations, and what is refused.

Laws: docs/ and core/tree.py. ``test_tree_machine.py`` compares the two operation by operation.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from treegraft.backends.reference import ReferenceTree
from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.errors import TreeError
from treegraft.core.roles import TreeBackend
from treegraft.core.tree import NOBODY, ROOT, Proposals, TokenTree

V = 5
NONE = -math.inf
COLUMNS = ("token", "parent", "depth", "logprob", "source", "scorer", "proposers")
STATES = ("alive", "leaf")


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


def test_a_sum_that_float32_cannot_hold_is_no_warning(tree: TreeBackend) -> None:
    """It is -inf; numpy warned of an overflow, which ended runs with warnings as errors."""
    tree.add_(paths((ROOT, [1, 2], [-3e38, -3e38])), source=0, overwrite=True)
    assert tree.logprob.tolist()[2] == NONE
    tree.rescore_(torch.tensor([0.0, -2e38, -2e38]), 1)
    assert tree.logprob.tolist()[2] == NONE
    assert tree.scorer.tolist() == [NOBODY, 1, 1]


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


def test_what_is_taken_out_is_not_found_again_until_it_is_proposed(tree: TreeBackend) -> None:
    tree.add_(paths((ROOT, [1, 2], [-1.0, -1.0]), (ROOT, [3], [-0.5])), source=0, overwrite=True)
    tree.keep_(torch.tensor([2]))  # [3]; node 3 is [1, 2]
    assert tree.alive.tolist() == [True, False, True, False]
    assert tree.leaf.tolist() == [False, False, True, False]
    assert tree.best(9, 0, 9).tolist() == [0, 2]
    assert tree.rank(torch.tensor([1, 2]), torch.tensor([5, 0]), 9).tolist() == [2]
    assert tree.prune(9).node.tolist() == [0, 2]
    # It comes back as a new node would, but under its number, and what hung below stays out.
    assert tree.add_(paths((ROOT, [1], [-2.0])), source=4, overwrite=False).tolist() == [[1]]
    assert tree.alive.tolist() == [True, True, True, False]
    assert (int(tree.source[1]), int(tree.scorer[1]), float(tree.logprob[1])) == (4, 4, -2.0)
    assert tree.best(9, 0, 9, unvisited_by=0).tolist() == [2, 1]
    assert tree.add_(paths((1, [2], [NONE])), source=4, overwrite=False).tolist() == [[3]]
    assert (int(tree.scorer[3]), float(tree.logprob[3])) == (NOBODY, NONE)
    tree.reset_(token=4, max_depth=3)
    tree.add_(paths((ROOT, [1, 2], [-1.0, -1.0])), source=0, overwrite=True)
    assert tree.alive.tolist() == [True] * 3


def test_nothing_hangs_under_a_node_that_was_taken_out_and_no_other_node_is_kept(
    tree: TreeBackend,
) -> None:
    tree.add_(paths((ROOT, [1, 2], [-1.0, -1.0])), source=0, overwrite=True)
    for wrong in (3, -1):
        with pytest.raises(TreeError, match=rf"^nodes to keep must be in the tree, found {wrong}$"):
            tree.keep_(torch.tensor([1, wrong]))
    assert tree.alive.all()
    tree.keep_(torch.tensor([], dtype=torch.int64))
    assert tree.alive.tolist() == [True, False, False]
    with pytest.raises(TreeError, match=r"^nodes to keep must be in the tree, found 2$"):
        tree.keep_(torch.tensor([2]))
    with pytest.raises(TreeError, match=r"^paths cannot hang under node 1, which was taken out$"):
        tree.add_(paths((1, [3], [-1.0])), source=0, overwrite=False)
    assert tree.n_nodes == 3


def test_a_tree_begins_again_at_one_of_its_nodes(tree: TreeBackend) -> None:
    tree.add_(paths((ROOT, [1, 2, 3], [-1.0, -0.5, NONE]), (ROOT, [3], [-0.5])), 0, False)
    tree.add_(paths((1, [4], [-0.25])), source=2, overwrite=True)
    tree.reroot_(1, max_depth=2)
    assert [tree.path(v) for v in range(tree.n_nodes)] == [[], [2], [2, 3], [4]]
    assert tree.token.tolist() == [1, 2, 3, 4]
    assert tree.logprob.tolist() == [0.0, -0.5, NONE, -0.25]
    assert tree.source.tolist() == [NOBODY, 0, 0, 2]
    assert tree.scorer.tolist() == [NOBODY, 0, NOBODY, 2]
    assert tree.best(9, 0, 9, unvisited_by=2).tolist() == [0, 3, 1, 2]
    assert tree.add_(paths((ROOT, [2, 0], [-9.0, -1.0])), 1, False).tolist() == [[1, 4]]
    assert tree.add_(paths((4, [0], [-1.0])), 1, False).tolist() == [[-1]]  # too deep
    tree.reroot_(3, max_depth=0)
    assert (tree.n_nodes, tree.token.tolist()) == (1, [4])
    with pytest.raises(TreeError, match=r"^the new root must be a node of the tree, found 1$"):
        tree.reroot_(1, max_depth=2)


def test_a_tree_with_draws_begins_at_no_other_node(tree: TreeBackend) -> None:
    made = paths((ROOT, [1], [-1.0]))
    q = torch.full((1, V), 1 / V)
    drawn = Proposals(made.positions, made.tokens, made.logprobs, made.match, torch.tensor([0]), q)
    tree.add_(drawn, 0, True)
    with pytest.raises(TreeError, match=r"^a tree with 1 draws cannot begin at another node$"):
        tree.reroot_(1, max_depth=2)


def test_pruning_to_nothing_leaves_the_root(tree: TreeBackend) -> None:
    tree.add_(paths((ROOT, [1, 2], [0.0, 0.0])), source=0, overwrite=False)
    pruned = tree.prune(0)
    pruned.check()
    assert len(pruned) == 1
    assert pruned.node.tolist() == [ROOT]


def test_no_proposals_change_nothing(tree: TreeBackend) -> None:
    assert tree.add_(Proposals.empty(), source=0, overwrite=True).shape == (0, 1)
    assert tree.n_nodes == 1


# --- the property ---------------------------------------------------------------------------------

SCORES = st.sampled_from(
    [NONE, math.nan, math.inf, 0.5, 0.0, -0.0, -1e-30, -0.1, -0.7, -2.5, -80.0]
)
PATHS = st.lists(
    st.tuples(
        st.integers(0, 10**6),
        st.lists(st.tuples(st.integers(-2, V + 1), SCORES), max_size=5),
    ),
    max_size=6,
)


class TwoTrees(RuleBasedStateMachine):
    """The same operations on both trees, nodes being taken out and drawn among them; every answer
    and every column must be equal. ``test_tree_machine`` is for trees that only grow.
    """

    def __init__(self) -> None:
        super().__init__()
        # Two slots, so that nearly every run outgrows its buffers.
        self.tensor = TensorTree(V)
        self.reference = ReferenceTree(V)

    @initialize(token=st.integers(0, V - 1), max_depth=st.integers(0, 6))
    def start(self, token: int, max_depth: int) -> None:
        self.reset(token, max_depth)

    @rule(
        token=st.integers(0, V - 1),
        max_depth=st.integers(0, 6),
        budget=st.one_of(st.none(), st.integers(0, 6)),
    )
    def reset(self, token: int, max_depth: int, budget: int | None = None) -> None:
        self.tensor.reset_(token, max_depth, budget)
        self.reference.reset_(token, max_depth, budget)

    @rule(
        position=st.integers(0, 10**6),
        tokens=st.lists(st.integers(0, V), min_size=1, max_size=3, unique=True),
        more=st.lists(st.integers(0, V - 1), max_size=2, unique=True),
        source=st.integers(0, 3),
        overwrite=st.booleans(),
    )
    def draw(
        self, position: int, tokens: list[int], more: list[int], source: int, overwrite: bool
    ) -> None:
        """Children drawn from a uniform q with an id that the target lacks, and others beside."""
        living = self.reference.alive.nonzero()[:, 0].tolist()
        n_paths = len(tokens) + len(more)
        made = Proposals.of_paths(
            [living[position % len(living)]] * n_paths,
            [[token] for token in (*tokens, *more)],
            [[-0.5]] * n_paths,
        )
        draws = torch.tensor([0] * len(tokens) + [-1] * len(more))
        q = torch.full((1, V + 1), 1 / (V + 1), dtype=torch.float64)
        columns = (made.positions, made.tokens, made.logprobs, made.match)
        proposals = Proposals(*columns, draws, q)
        proposals.check(self.reference.n_nodes)
        ours = self.tensor.add_(proposals, source, overwrite)
        assert ours.tolist() == self.reference.add_(proposals, source, overwrite).tolist()

    @rule(drawn=PATHS, source=st.integers(0, 3), overwrite=st.booleans())
    def add(
        self, drawn: list[tuple[int, list[tuple[int, float]]]], source: int, overwrite: bool
    ) -> None:
        n = self.reference.n_nodes
        living = self.reference.alive.nonzero()[:, 0].tolist()
        proposals = Proposals.of_paths(
            [living[position % len(living)] for position, _ in drawn],
            [[token for token, _ in path] for _, path in drawn],
            [[score for _, score in path] for _, path in drawn],
        )
        proposals.check(n)
        old = {name: getattr(self.reference, name).clone() for name in COLUMNS[:3]}
        alive = self.reference.alive.clone()
        source_before = self.reference.source.clone()
        ours = self.tensor.add_(proposals, source, overwrite)
        theirs = self.reference.add_(proposals, source, overwrite)
        assert ours.tolist() == theirs.tolist()
        for name, column in old.items():  # nothing is removed or moved
            assert torch.equal(getattr(self.tensor, name)[:n], column)
        assert torch.equal(self.tensor.source[:n][alive], source_before[alive])
        assert bool(self.tensor.alive[:n][alive].all())

    @rule(node=st.integers(0, 10**6), max_depth=st.integers(0, 6))
    def reroot(self, node: int, max_depth: int) -> None:
        living = self.reference.alive.nonzero()[:, 0].tolist()
        node = living[node % len(living)]
        above = len(self.reference.path(node))
        expected = [
            (path[above:], int(self.reference.source[v]), int(self.reference.scorer[v]))
            for v in living
            if v >= node
            and (path := self.reference.path(v))[:above] == self.reference.path(node)
            and len(path) - above <= max_depth
        ]
        if self.reference.n_drawn:  # what was drawn once is not there to be drawn again
            for tree in (self.tensor, self.reference):
                with pytest.raises(TreeError, match="draws cannot begin at another node"):
                    tree.reroot_(node, max_depth)
            return
        self.tensor.reroot_(node, max_depth)
        self.reference.reroot_(node, max_depth)
        found = [self.tensor.path(v) for v in range(self.tensor.n_nodes)]
        assert found == [path for path, _, _ in expected]
        sources = list(zip(self.tensor.source.tolist(), self.tensor.scorer.tolist(), strict=True))
        assert sources[1:] == [(source, scorer) for _, source, scorer in expected[1:]]

    @rule(chosen=st.lists(st.integers(0, 10**6), max_size=4))
    def keep(self, chosen: list[int]) -> None:
        living = self.reference.alive.nonzero()[:, 0]
        nodes = living[torch.tensor([i % len(living) for i in chosen], dtype=torch.int64)]
        self.tensor.keep_(nodes)
        self.reference.keep_(nodes)
        above = self.reference.ancestors(nodes).any(0)
        above[ROOT] = True
        if self.reference.n_drawn == 0:
            assert torch.equal(self.reference.alive, above)
        else:  # nodes under which something was drawn stay
            assert bool(self.reference.alive[above].all())

    @rule(data=st.data(), source=st.integers(0, 3))
    def rescore(self, data: st.DataObject, source: int) -> None:
        n = self.reference.n_nodes
        scores = torch.tensor(data.draw(st.lists(SCORES, min_size=n, max_size=n)))
        self.tensor.rescore_(scores, source)
        self.reference.rescore_(scores, source)

    @rule(
        width=st.integers(1, 12),
        low=st.integers(-4, 6),
        high=st.integers(0, 6),
        unvisited_by=st.one_of(st.none(), st.integers(0, 3)),
    )
    def best(self, width: int, low: int, high: int, unvisited_by: int | None) -> None:
        ours = self.tensor.best(width, low, high, unvisited_by).tolist()
        assert ours == self.reference.best(width, low, high, unvisited_by).tolist()

    @rule(
        drawn=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3)), max_size=9),
        width=st.integers(1, 12),
    )
    def rank(self, drawn: list[tuple[int, int]], width: int) -> None:
        nodes = torch.tensor([i % self.reference.n_nodes for i, _ in drawn], dtype=torch.int64)
        match = torch.tensor([length for _, length in drawn], dtype=torch.int64)
        ours = self.tensor.rank(nodes, match, width).tolist()
        assert ours == self.reference.rank(nodes, match, width).tolist()

    @rule(budget=st.integers(0, 40))
    def prune(self, budget: int) -> None:
        answers = []
        for tree in (self.tensor, self.reference):
            try:
                answers.append(tree.prune(budget))
            except TreeError as error:
                answers.append(str(error))
        ours, theirs = answers
        if isinstance(ours, str):
            assert ours == theirs
            assert "under which something was drawn" in ours
            return
        ours.check()
        theirs.check()
        for name in (*COLUMNS, "ancestors", "node"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        n_drawn = self.reference.n_drawn
        assert (ours.ledger is None) == (theirs.ledger is None) == (n_drawn == 0)
        if ours.ledger is None:
            assert_law_5(self.reference, theirs, budget)
            return
        assert int((ours.ledger.row >= 0).sum()) == n_drawn
        for name in ("node", "token", "child", "row", "q"):
            assert torch.equal(getattr(ours.ledger, name), getattr(theirs.ledger, name)), name

    @invariant()
    def agree(self) -> None:
        for name in (*COLUMNS, *STATES):
            ours, theirs = getattr(self.tensor, name), getattr(self.reference, name)
            assert ours.dtype == theirs.dtype, name
            assert torch.equal(ours, theirs), name
        assert self.tensor.n_drawn == self.reference.n_drawn
        everyone = torch.arange(self.reference.n_nodes)
        assert torch.equal(self.tensor.ancestors(everyone), self.reference.ancestors(everyone))
        for source in range(4):
            ours, theirs = (t.best(99, 0, 9, source) for t in (self.tensor, self.reference))
            assert torch.equal(ours, theirs)
        for node in everyone.tolist():
            assert self.tensor.path(node) == self.reference.path(node)


def assert_law_5(tree: TreeBackend, pruned: TokenTree, budget: int) -> None:
    """The budget holds, ancestors are kept, and no dropped node was the better choice."""
    kept = set(pruned.node.tolist())
    alive = tree.alive.tolist()
    assert len(kept) == min(budget + 1, sum(alive))
    assert all(alive[node] for node in kept)
    parent, logprob = tree.parent.tolist(), tree.logprob.tolist()
    assert all(parent[node] in kept for node in kept)
    worst = min(logprob[node] for node in kept)
    available = [v for v in range(tree.n_nodes) if alive[v] and v not in kept and parent[v] in kept]
    assert all(logprob[v] <= worst for v in available)


class ManyTrees(TwoTrees):
    """The same, for the slow run."""


TestTrees = TwoTrees.TestCase
TestTrees.settings = settings(stateful_step_count=30)
TestTreesThoroughly = pytest.mark.slow(ManyTrees.TestCase)
TestTreesThoroughly.settings = settings(settings.get_profile("thorough"), stateful_step_count=40)


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
