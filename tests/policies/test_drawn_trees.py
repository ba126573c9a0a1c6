"""Trees with drawn children: what the rules take, against exact arithmetic with the same noise;
then drafters that draw, and whole pipelines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import TableModel, hashed_model, mixed_model

from treegraft import parse_config
from treegraft.backends.exact import ExactLedger, ExactTraversal, ExactVerifier, KeyedDice
from treegraft.backends.reference import ReferenceTree
from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.errors import TreeError
from treegraft.core.roles import Context, Touched, TreeBackend, TreeBuilder, Verifier
from treegraft.core.sampling import (
    COINS,
    DRAWS,
    History,
    Noise,
    Sampling,
    TargetDistribution,
    keyed_uniform,
)
from treegraft.core.tree import ROOT, Proposals, TokenTree
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.drafters.lm import LmConfig, LmDrafter
from treegraft.policies.verifiers import (
    LedgerConfig,
    LedgerVerifier,
    TraversalConfig,
    TraversalVerifier,
    WalkConfig,
    WalkVerifier,
)

V = 4
LEDGER = LedgerVerifier(LedgerConfig())
TRAVERSAL = TraversalVerifier(TraversalConfig())
WALK = WalkVerifier(WalkConfig())
RULES: list[tuple[Verifier, type[ExactVerifier]]] = [
    (LEDGER, ExactLedger),
    (TRAVERSAL, ExactTraversal),
]


class SetNoise(Noise):
    """Coins that a test chooses, in the order of tossing; no noise on tokens."""

    def __init__(self, *coins: float) -> None:
        super().__init__(0, V)
        self.coins = list(coins)

    def token(self, position: int, scores: torch.Tensor) -> int:
        return int(scores.argmax())

    def coin(self, position: int, number: int) -> float:
        return self.coins.pop(0)


def drawn(position: int, tokens: list[int], q: list[float]) -> Proposals:
    """``tokens`` drawn under one node from ``q``."""
    n = len(tokens)
    made = Proposals.of_paths([position] * n, [[t] for t in tokens], [[-1.0]] * n)
    return Proposals(
        made.positions,
        made.tokens,
        made.logprobs,
        made.match,
        torch.zeros(n, dtype=torch.int64),
        torch.tensor([q], dtype=torch.float64),
    )


def target(
    tree: TokenTree, law: list[list[float]], noise: Noise, temperature: float = 1.0
) -> TargetDistribution:
    logits = torch.tensor(law, dtype=torch.float64).log()
    sampling = Sampling(temperature=temperature, seed=noise.seed)
    return TargetDistribution(logits, tree, sampling, History([3, 0], 2), noise)


@pytest.fixture(params=[TensorTree, ReferenceTree], ids=["tensor", "reference"])
def tree(request: pytest.FixtureRequest) -> TreeBackend:
    made: TreeBackend = request.param(V)
    made.reset_(token=0, max_depth=3, budget=3)
    return made


# --- the story: one draw, p = (1/2, 1/4, 1/4, 0), q = (1/4, 1/4, 1/4, 1/4) ------------------------

P = [0.5, 0.25, 0.25, 0.0]
UNIFORM = [0.25] * 4


@pytest.mark.parametrize("verifier", [LEDGER, TRAVERSAL], ids=["ledger", "traversal"])
def test_a_draw_that_the_target_likes_better_is_always_accepted(
    tree: TreeBackend, verifier: Verifier
) -> None:
    tree.add_(drawn(ROOT, [0], UNIFORM), 0, True)
    pruned = tree.prune(3)
    verdict = verifier.verdict(pruned, target(pruned, [P, P], SetNoise(0.999)))
    assert verdict.path == (1,)
    assert verdict.tokens == (0, 0)


@pytest.mark.parametrize("verifier", [LEDGER, TRAVERSAL], ids=["ledger", "traversal"])
def test_a_draw_that_the_target_excludes_is_rejected(tree: TreeBackend, verifier: Verifier) -> None:
    tree.add_(drawn(ROOT, [3], UNIFORM), 0, True)
    pruned = tree.prune(3)
    verdict = verifier.verdict(pruned, target(pruned, [P, P], SetNoise(1e-9, 1e-9)))
    # The residual is (1/4, 0, 0, 0) normalised.
    assert verdict.path == ()
    assert verdict.tokens == (0,)


def test_a_draw_is_accepted_with_its_share_and_else_the_residual_speaks(tree: TreeBackend) -> None:
    skewed = [0.125, 0.625, 0.125, 0.125]
    tree.add_(drawn(ROOT, [1], skewed), 0, True)
    pruned = tree.prune(3)
    # p / q = 0.4
    accepted = LEDGER.verdict(pruned, target(pruned, [P, P], SetNoise(0.39)))
    rejected = LEDGER.verdict(pruned, target(pruned, [P, P], SetNoise(0.41)))
    assert accepted.path == (1,)
    assert rejected.path == ()
    assert rejected.tokens == (0,)  # (3/8, 0, 1/8, 0)


def test_zero_residual_mass_takes_the_draw(tree: TreeBackend) -> None:
    """Where p and q are one, nothing is left after a rejection, and none may happen."""
    thirds = [1 / 3, 1 / 3, 1 / 3, 0.0]
    tree.add_(drawn(ROOT, [2], thirds), 0, True)
    pruned = tree.prune(3)
    for verifier in (LEDGER, TRAVERSAL):
        for coin in (0.5, 1 - 2**-53):
            verdict = verifier.verdict(pruned, target(pruned, [thirds, P], SetNoise(coin, coin)))
            assert verdict.path == (1,)


def test_rounding_neither_takes_what_the_target_excludes_nor_ends_in_an_error(
    tree: TreeBackend,
) -> None:
    """Draws that are all but impossible: the root's rate fell below 1, or to 0 / 0."""
    for p, q, token in (
        ([1.0, 0.0, 0.0, 0.0], [1 - 1e-16, 1e-16, 0.0, 0.0], 1),
        ([0.5, 0.25, 0.25, 0.0], [0.2, 0.5, 0.3, 0.0], 1),
    ):
        tree.reset_(token=0, max_depth=3, budget=3)
        tree.add_(drawn(ROOT, [token], q), 0, True)
        pruned = tree.prune(3)
        for verifier in (LEDGER, TRAVERSAL):
            for coin in (1e-9, 0.5, 1 - 2**-53):
                said = target(pruned, [p, P], SetNoise(coin, coin))
                assert p[verifier.verdict(pruned, said).tokens[0]] > 0


def test_what_a_drafter_does_to_its_buffer_later_changes_no_draw(tree: TreeBackend) -> None:
    proposals = drawn(ROOT, [0], UNIFORM)
    tree.add_(proposals, 0, True)
    assert proposals.q is not None
    proposals.q.zero_()
    ledger = tree.prune(3).ledger
    assert ledger is not None
    assert ledger.q.tolist() == [UNIFORM]


def test_a_draw_that_lost_its_node_is_still_accepted(tree: TreeBackend) -> None:
    """It was drawn, so it counts; there is only nothing below it to go on with."""
    tree.add_(drawn(ROOT, [0, 1], UNIFORM), 0, True)
    pruned = tree.prune(1)
    assert len(pruned) == 2
    assert pruned.ledger is not None
    assert pruned.ledger.child.tolist() == [1, -1]
    law = [[0.0, 0.75, 0.25, 0.0], P]
    verdict = LEDGER.verdict(pruned, target(pruned, law, SetNoise(0.5, 0.5)))
    assert verdict.path == ()
    assert verdict.tokens == (1,)


def test_a_duplicate_has_a_slot_of_its_own(tree: TreeBackend) -> None:
    tree.add_(Proposals.of_paths([ROOT], [[1]], [[-1.0]]), 0, True)
    tree.add_(drawn(ROOT, [1], UNIFORM), 1, True)
    tree.add_(drawn(ROOT, [1, 2], UNIFORM), 2, True)
    ledger = tree.prune(3).ledger
    assert ledger is not None
    assert ledger.token.tolist() == [1, 1, 1, 2]
    assert ledger.row.tolist() == [-1, 0, 1, 1]
    assert ledger.child.tolist() == [1, 1, 1, 2]


def test_nodes_under_which_something_was_drawn_are_kept_before_better_ones(
    tree: TreeBackend,
) -> None:
    tree.add_(Proposals.of_paths([ROOT] * 2, [[0, 0], [1]], [[-0.1, -0.1], [-9.0]]), 0, True)
    tree.add_(drawn(2, [3], UNIFORM), 1, True)
    assert tree.token.tolist() == [0, 0, 1, 0, 3]
    assert tree.prune(1).node.tolist() == [0, 2]
    assert tree.prune(2).node.tolist() == [0, 1, 2]
    with pytest.raises(TreeError, match="a budget of 0 cannot hold the 1 nodes"):
        tree.prune(0)


def test_draws_are_refused_where_the_budget_cannot_keep_their_node(tree: TreeBackend) -> None:
    tree.reset_(token=0, max_depth=9, budget=1)
    first = tree.add_(drawn(ROOT, [0, 1], UNIFORM), 0, True)
    assert tree.add_(drawn(int(first[0, 0]), [2], UNIFORM), 0, True).tolist() == [[3]]
    # The budget holds one node besides the root, and that one is promised.
    assert tree.add_(drawn(int(first[1, 0]), [2], UNIFORM), 0, True).tolist() == [[-1]]
    assert tree.add_(drawn(3, [2], UNIFORM), 0, True).tolist() == [[-1]]
    assert tree.n_drawn == 3
    tree.reset_(token=0, max_depth=1, budget=9)
    assert tree.n_drawn == 0
    node = int(tree.add_(drawn(ROOT, [2], UNIFORM), 0, True)[0, 0])
    assert tree.add_(drawn(node, [2], UNIFORM), 0, True).tolist() == [[-1]]
    assert tree.n_drawn == 1


def test_an_id_that_only_the_drafter_has_is_a_slot_that_is_never_taken(tree: TreeBackend) -> None:
    tree.add_(drawn(ROOT, [4, 0], [0.25, 0.0, 0.0, 0.25, 0.5]), 0, True)
    pruned = tree.prune(3)
    assert pruned.token.tolist() == [0, 0]
    assert pruned.ledger is not None
    assert pruned.ledger.child.tolist() == [-1, 1]
    for verifier in (LEDGER, TRAVERSAL):
        noise = SetNoise(*[1e-9] * 3)
        assert verifier.verdict(pruned, target(pruned, [P, P], noise)).tokens == (0, 0)


# --- the same tokens as exact arithmetic with the same noise --------------------------------------

DRAWN_PATHS = st.lists(
    st.tuples(
        st.integers(0, 10**6),
        st.permutations(range(V)),
        st.integers(0, 3),
        st.lists(st.integers(1, 9), min_size=V, max_size=V),
    ),
    max_size=6,
)


@st.composite
def drawn_trees(draw: st.DrawFn) -> tuple[TokenTree, TokenTree]:
    """One tree grown twice, by both backends: draws and other children in any order."""
    budget = draw(st.integers(0, 9))
    made = []
    calls = draw(DRAWN_PATHS)
    for backend in (TensorTree(V), ReferenceTree(V)):
        backend.reset_(token=0, max_depth=4, budget=budget)
        for position, tokens, n_drawn, weights in calls:
            position %= backend.n_nodes
            q = [w / sum(weights) for w in weights]
            if n_drawn:
                backend.add_(drawn(position, list(tokens[:n_drawn]), q), 0, True)
            else:
                paths = Proposals.of_paths([position], [list(tokens[:2])], [[-0.5, -0.5]])
                backend.add_(paths, 1, True)
        made.append(backend.prune(budget))
    return made[0], made[1]


@given(trees=drawn_trees(), seed=st.integers(0, 2**64 - 1), data=st.data())
@settings(max_examples=100)
def test_tokens_equal_those_of_exact_arithmetic_with_the_same_noise(
    trees: tuple[TokenTree, TokenTree], seed: int, data: st.DataObject
) -> None:
    ours, theirs = trees
    ours.check()
    for name in ("token", "parent", "node", "logprob"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert (ours.ledger is None) == (theirs.ledger is None)
    if ours.ledger is not None and theirs.ledger is not None:
        for name in ("node", "token", "child", "row", "q"):
            assert torch.equal(getattr(ours.ledger, name), getattr(theirs.ledger, name)), name
    temperature = data.draw(st.sampled_from([0.0, 0.7, 1.0]))
    weights = st.lists(st.integers(0, 5), min_size=V, max_size=V).filter(any)
    law = [data.draw(weights) for _ in range(len(ours))]
    for verifier, exact in RULES:
        said = target(ours, [[float(w) for w in row] for row in law], Noise(seed, V), temperature)
        laws = []
        for node in range(len(ours)):
            row = [Fraction(p) for p in said.probabilities(node).tolist()]
            laws.append([p / sum(row) for p in row])
        rule = exact(ours, lambda i, laws=laws: laws[i], KeyedDice(said), None, said.position(ROOT))
        assert verifier.verdict(ours, said) == rule.verdict()
        if temperature == 0.0:
            assert verifier.verdict(ours, said) == WALK.verdict(ours, said)
    if ours.ledger is None:
        assert LEDGER.verdict(ours, said) == WALK.verdict(ours, said)


def test_no_noise_is_used_twice() -> None:
    """Tokens, coins and draws come from different streams, and each number is its own coin."""
    draws = {
        (stream, position, number): keyed_uniform(5, position, 3, stream, number).tobytes()
        for stream in (0, COINS, DRAWS, DRAWS + 1)
        for position in (0, 1, 2**20)
        for number in (0, 1, 2**20)
    }
    assert len(set(draws.values())) == len(draws)


# --- drafters that draw ---------------------------------------------------------------------------


def begun(children: str, seed: int, temperature: float = 1.0, **options: float) -> LmDrafter:
    config = LmConfig(model="m", children=children, **options)
    drafter = LmDrafter(config, hashed_model(V, seed=4, scale=1.0))
    drafter.begin(Context([1, 2], 20, V, None, temperature=temperature, seed=seed))
    return drafter


def proposals_of(drafter: LmDrafter, width: int) -> Proposals:
    tree = TensorTree(V)
    tree.reset_(2, 9)
    made = drafter.propose(tree, torch.tensor([ROOT]), width)
    made.check(1)
    return made


def test_children_are_drawn_without_replacement_from_the_q_that_is_declared() -> None:
    """Over 2,000 seeds the pairs come as often as q says, within four standard deviations."""
    n = 2000
    pairs: Counter[tuple[int, ...]] = Counter()
    for seed in range(n):
        made = proposals_of(begun("sample", seed, temperature=1.5), width=2)
        assert made.q is not None
        assert made.draw is not None
        assert made.draw.tolist() == [0, 0]
        pairs[tuple(made.tokens[:, 0].tolist())] += 1
    q = made.q[0]
    assert float(q.sum()) == pytest.approx(1.0)
    for (first, second), count in pairs.items():
        p = float(q[first] * q[second] / (1 - q[first]))
        assert abs(count - n * p) < 4 * (n * p * (1 - p)) ** 0.5 + 1
    assert len(pairs) == V * (V - 1)


def test_one_draw_goes_before_the_likeliest() -> None:
    seen = set()
    for seed in range(60):
        made = proposals_of(begun("topk_plus_one_sample", seed), width=3)
        assert made.draw is not None
        assert made.draw.tolist() == [0, -1, -1]
        likeliest = proposals_of(begun("topk", seed), width=2)
        assert made.tokens[1:].tolist() == likeliest.tokens.tolist()
        seen.add(int(made.tokens[0]))
    assert len(seen) == V


def test_nothing_is_drawn_at_temperature_0() -> None:
    greedy, plain = (
        proposals_of(begun(kind, 3, temperature=0.0), 3) for kind in ("sample", "topk")
    )
    assert greedy.draw is None
    assert torch.equal(greedy.tokens, plain.tokens)


def test_the_temperature_of_draws_can_be_set() -> None:
    own = proposals_of(begun("sample", 3, draw_temperature=0.5), 2)
    same = proposals_of(begun("sample", 3, temperature=0.5), 2)
    assert own.q is not None
    assert same.q is not None
    assert torch.equal(own.q, same.q)


def test_a_tiny_temperature_draws_the_likeliest() -> None:
    """Dividing by it made every probability NaN, and the proposals were refused."""
    for temperature in (5e-324, 1e-30, 1e-9):
        made = proposals_of(begun("sample", 3, temperature=temperature), 3)
        assert made.tokens.tolist() == proposals_of(begun("topk", 3), 1).tokens.tolist()
        assert made.q is not None
        assert made.q[0, made.tokens[0, 0]] == 1.0


def test_two_draws_of_a_step_use_different_noise() -> None:
    drafter = begun("sample", 9)
    tree = TensorTree(V)
    tree.reset_(2, 9)
    orders = {
        tuple(drafter.propose(tree, torch.tensor([ROOT]), 4).tokens[:, 0].tolist())
        for _ in range(30)
    }
    assert len(orders) > 5


# --- pipelines ------------------------------------------------------------------------------------

TARGET = hashed_model(3, seed=2, order=1, scale=1.0)
DRAFTER = mixed_model(TARGET, hashed_model(3, seed=8, order=1, scale=1.0), 0.6)


def pipeline(verifier: str, children: str, temperature: float, **more: object) -> Pipeline:
    config = {
        "target": {"model": "target"},
        "drafters": [
            {"kind": "ngram"},
            {"kind": "lm", "model": "drafter", "children": children},
            {"kind": "lm", "model": "target", "name": "self", "children": children},
        ],
        "builder": {"kind": "layered", "depth": 3, "width": 2, "budget": 5},
        "scheduler": {"kind": "fixed", "calls": [1, 0, 2]},
        "verifier": {"kind": verifier},
        "sampling": {"temperature": temperature},
        "stop": {"max_new_tokens": 4},
        **more,
    }
    return build_pipeline(parse_config(config), models={"target": TARGET, "drafter": DRAFTER})


@pytest.mark.parametrize("children", ["sample", "topk_plus_one_sample"])
@pytest.mark.parametrize("verifier", ["ledger", "traversal"])
def test_sampled_texts_of_a_pipeline_have_the_targets_law(verifier: str, children: str) -> None:
    """250 seeds: chi-square over all 27 texts of 3 tokens, far below the value that doubts it."""
    made, n = pipeline(verifier, children, 1.0), 250
    assert not made.config.same_tokens
    texts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(n):
        result = made.generate([0, 1], seed=seed, max_new_tokens=3)
        texts[tuple(result.tokens)] += 1
        accepted += sum(step.n_path for step in result.steps)
    chi = 0.0
    for a in range(3):
        for b in range(3):
            for c in range(3):
                p = 1.0
                for before, token in zip((1, a, b), (a, b, c), strict=True):
                    p *= float(TARGET.logits([before]).softmax(-1)[token])
                chi += (texts[a, b, c] - n * p) ** 2 / (n * p)
    assert chi < 55  # 26 degrees of freedom: the 0.1 % quantile is 54
    assert accepted > n / 2


@pytest.mark.parametrize("verifier", ["walk", "ledger", "traversal"])
@pytest.mark.parametrize("children", ["topk", "sample", "topk_plus_one_sample"])
def test_greedy_tokens_are_plain_decodings_whatever_the_verifier(
    verifier: str, children: str
) -> None:
    made = pipeline(verifier, children, 0.0)
    plain = pipeline("walk", "topk", 0.0, drafters=[], scheduler={"kind": "never"})
    assert made.config.same_tokens
    assert (
        made.generate([0, 1], max_new_tokens=40).tokens
        == plain.generate([0, 1], max_new_tokens=40).tokens
    )


@pytest.mark.parametrize("children", ["topk", "sample", "topk_plus_one_sample"])
def test_seeded_tokens_of_a_walk_are_plain_decodings_whatever_is_drawn(children: str) -> None:
    made = pipeline("walk", children, 1.0)
    plain = pipeline("walk", "topk", 1.0, drafters=[], scheduler={"kind": "never"})
    for seed in range(5):
        drafted = made.generate([0, 1], max_new_tokens=30, seed=seed).tokens
        assert drafted == plain.generate([0, 1], max_new_tokens=30, seed=seed).tokens


def test_a_ledger_without_draws_gives_the_tokens_of_a_walk() -> None:
    ledger, walk = pipeline("ledger", "topk", 0.9), pipeline("walk", "topk", 0.9)
    assert ledger.config.same_tokens
    for seed in range(5):
        drafted = ledger.generate([0, 1], max_new_tokens=30, seed=seed)
        assert drafted.tokens == walk.generate([0, 1], max_new_tokens=30, seed=seed).tokens


@pytest.mark.parametrize("verifier", ["ledger", "traversal"])
def test_a_seed_gives_the_same_drawn_text_every_time(verifier: str) -> None:
    made = pipeline(verifier, "sample", 1.0)
    texts = [made.generate([0, 1], max_new_tokens=30, seed=seed).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    slow = pipeline(verifier, "sample", 1.0, backend={"kind": "reference"})
    assert slow.generate([0, 1], max_new_tokens=30, seed=1).tokens == texts[0]


@pytest.mark.parametrize("verifier", ["walk", "ledger", "traversal"])
def test_a_draw_that_makes_the_target_nan_still_counts(verifier: str) -> None:
    """The tree was dropped with all that was drawn, and whether it was depended on the draw."""
    p, q = [0.4, 0.3, 0.3], [0.4, 0.1, 0.5]

    def spoiled(text: Sequence[int]) -> torch.Tensor:
        return torch.tensor(p if text[-1] != 2 else [torch.nan] * 3).log()

    models = {
        "target": TableModel(spoiled, 3),
        "drafter": TableModel(lambda text: torch.tensor(q).log(), 3),
    }
    config = {
        "target": {"model": "target"},
        "drafters": [{"kind": "lm", "model": "drafter", "children": "sample"}],
        "builder": {"kind": "chain", "depth": 1},
        "scheduler": {"kind": "always"},
        "verifier": {"kind": verifier},
        "sampling": {"temperature": 1.0},
        "stop": {"max_new_tokens": 2, "eos": [2]},
    }
    made, n = build_pipeline(parse_config(config), models=models), 300
    first = Counter(made.generate([0], seed=seed).tokens[0] for seed in range(n))
    for token, share in enumerate(p):
        assert abs(first[token] - n * share) < 4 * (n * share * (1 - share)) ** 0.5


class OwnPruning(TreeBuilder):
    """Verifies the first nodes of the tree, and forgets what was drawn."""

    depth, width, budget = 2, 2, 3

    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> torch.Tensor:
        return tree.rank(touched.nodes, touched.match, 2)

    def prune(self, tree: TreeBackend) -> TokenTree:
        return replace(tree.prune(self.budget), ledger=None)


def test_a_builder_that_leaves_draws_out_is_found_out_where_it_matters() -> None:
    builder = {"kind": "test_drawn_trees:OwnPruning"}
    fixed = {"kind": "fixed", "calls": [1, 1]}
    with pytest.raises(TreeError, match="must hold all 6 draws, found 0; prune with the tree's"):
        pipeline("ledger", "sample", 1.0, builder=builder, scheduler=fixed).generate([0, 1])
    walked = pipeline("walk", "sample", 1.0, builder=builder, scheduler=fixed)
    plain = pipeline("walk", "topk", 1.0, drafters=[], scheduler={"kind": "never"})
    assert walked.generate([0, 1]).tokens == plain.generate([0, 1]).tokens


# --- what is refused ------------------------------------------------------------------------------


def changed(**columns: object) -> Proposals:
    good = drawn(ROOT, [1, 2], UNIFORM)
    names = ("positions", "tokens", "logprobs", "match", "draw", "q")
    return Proposals(**{**{name: getattr(good, name) for name in names}, **columns})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (changed(draw=torch.tensor([0])), "need draw of shape [2] and type int64"),
        (changed(draw=torch.tensor([0, 1])), "must name rows -1..0 of q, found [0, 1]"),
        (changed(q=None), "need q of shape [Q, V]"),
        (changed(q=torch.tensor([[0.5, 0.5, 0.5, 0.5]])), "probabilities and sum to 1"),
        (changed(q=torch.tensor([[0.5, 0.5, 0.0, 0.0]])), "a token of probability 0 cannot"),
        (changed(q=torch.tensor([[torch.nan] * 4])), "probabilities and sum to 1"),
        (changed(tokens=torch.tensor([[1], [4]])), "drawn tokens must be 0..3, found 4"),
        (changed(tokens=torch.tensor([[1], [1]])), "token 1 was drawn twice from row 0 of q"),
        (changed(positions=torch.tensor([0, 1])), "row 0 of q must hang under one node"),
        (
            changed(tokens=torch.tensor([[1, 2], [2, -1]]), logprobs=torch.zeros(2, 2)),
            "a drawn path must be one token long",
        ),
    ],
)
def test_draws_that_cannot_have_been_are_refused(wrong: Proposals, message: str) -> None:
    with pytest.raises(TreeError) as caught:
        wrong.check(n_nodes=2)
    assert message in str(caught.value)
