"""The model drafter: what it says (laws 3 and 4), what it reads, what a commit leaves (law 6).

Table models assert at every forward that rows, positions and visibility form paths, so a wrong
row, position or mask fails there; equality with the text's own logits proves the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import TableModel, hashed_model
from torch import Tensor

from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.language_model import LanguageModel, extend
from treegraft.core.roles import Commit, Context
from treegraft.core.tree import ROOT, Proposals
from treegraft.policies.drafters.lm import LmConfig, LmDrafter

V = 7


class Session:
    """A drafter beside the tree and the text that it is told about."""

    def __init__(self, model: LanguageModel, prompt: Sequence[int], read_ahead: int = 32) -> None:
        self.model = model
        self.text = list(prompt)
        self.drafter = LmDrafter(LmConfig(model="m", read_ahead=read_ahead), model)
        self.drafter.begin(Context(tuple(prompt), 200, V, None))
        self.tree = TensorTree(V)
        self.tree.reset_(self.text[-1], 64)

    def hang(self, *paths: tuple[int, Sequence[int]]) -> None:
        """Another drafter's guesses."""
        positions, tokens = [p for p, _ in paths], [list(t) for _, t in paths]
        scores = [[-1.0] * len(t) for t in tokens]
        self.tree.add_(Proposals.of_paths(positions, tokens, scores), 0, overwrite=False)

    def expand(self, nodes: Sequence[int], width: int) -> None:
        proposals = self.drafter.propose(self.tree, torch.tensor(nodes), width)
        proposals.check(self.tree.n_nodes)
        self.tree.add_(proposals, 1, overwrite=True)

    def commit(self, node: int, bonus: Sequence[int]) -> None:
        """Accept the path down to ``node``, then the bonus."""
        lineage = self.tree.ancestors(torch.tensor([node]))[0].nonzero()[:, 0].tolist()
        tokens = [*self.tree.path(node), *bonus]
        self.drafter.observe(Commit(tuple(tokens), tuple(lineage[1:]), None))
        self.text += tokens
        self.tree.reset_(self.text[-1], 64)


def table_session(prompt: Sequence[int] = (1, 2, 3), read_ahead: int = 32) -> Session:
    return Session(hashed_model(V, seed=5, order=3), prompt, read_ahead)


def logq(session: Session, node: int) -> Tensor:
    """What the model says after ``node``, asked about the bare text."""
    model = session.model
    assert isinstance(model, TableModel)
    return model.logits(session.text + session.tree.path(node)).log_softmax(-1)


def assert_scores_are_those_of_the_paths(session: Session) -> None:
    scores = session.drafter.score(session.tree)
    parent, token = session.tree.parent.tolist(), session.tree.token.tolist()
    for node in range(1, session.tree.n_nodes):
        expected = logq(session, parent[node])[token[node]]
        torch.testing.assert_close(scores[node], expected, rtol=0, atol=1e-6)


# --- the story ------------------------------------------------------------------------------------


def test_it_proposes_its_likeliest_tokens() -> None:
    session = table_session()
    proposals = session.drafter.propose(session.tree, torch.tensor([ROOT]), 3)
    top = logq(session, ROOT).topk(3)
    assert proposals.tokens[:, 0].tolist() == top.indices.tolist()
    torch.testing.assert_close(proposals.logprobs[:, 0], top.values, rtol=0, atol=1e-6)


def test_it_scores_what_others_proposed() -> None:
    session = table_session()
    session.hang((ROOT, [1, 2, 3]), (ROOT, [1, 4]), (ROOT, [6]))
    assert_scores_are_those_of_the_paths(session)


def test_after_a_commit_it_goes_on_where_the_text_is() -> None:
    session = table_session()
    session.hang((ROOT, [1, 2, 3]), (ROOT, [4, 5]))
    session.drafter.score(session.tree)
    session.commit(node=4, bonus=[0])  # level by level: 1=[1] 2=[4] 3=[1,2] 4=[4,5]
    assert session.text == [1, 2, 3, 4, 5, 0]
    session.expand([ROOT], 2)
    session.expand([1, 2], 2)
    assert_scores_are_those_of_the_paths(session)


# --- what goes through the model ------------------------------------------------------------------


def reads(session: Session, act: Any) -> int:
    model = session.model
    assert isinstance(model, TableModel)
    before = model.reads
    act()
    return model.reads - before


def test_a_node_is_read_once() -> None:
    session = table_session(prompt=[1, 2, 3], read_ahead=0)
    assert reads(session, lambda: session.expand([ROOT], 2)) == 3  # the prompt, root included
    assert reads(session, lambda: session.drafter.score(session.tree)) == 0
    session.hang((1, [5, 6]))
    # Scoring needs what stands before each node: node 1 and the new inner node, not the leaf.
    assert reads(session, lambda: session.drafter.score(session.tree)) == 2
    assert reads(session, lambda: session.drafter.score(session.tree)) == 0
    assert reads(session, lambda: session.expand([ROOT, 1, 3], 2)) == 0
    assert reads(session, lambda: session.expand([4], 2)) == 1


def test_leaves_ride_along_when_scoring_reads_anyway() -> None:
    session = table_session(read_ahead=2)
    session.hang((ROOT, [1]), (ROOT, [2]))
    assert reads(session, lambda: session.drafter.score(session.tree)) == 3 + 2
    assert reads(session, lambda: session.expand([1, 2], 2)) == 0
    # More leaves than that stay unread until someone asks for them.
    crowded = table_session(read_ahead=2)
    crowded.hang((ROOT, [1]), (ROOT, [2]), (ROOT, [3]))
    assert reads(crowded, lambda: crowded.drafter.score(crowded.tree)) == 3


def test_accepted_nodes_are_not_read_again() -> None:
    session = table_session()
    session.hang((ROOT, [1, 2, 3]))
    session.drafter.score(session.tree)
    session.commit(node=3, bonus=[4])
    assert reads(session, lambda: session.expand([ROOT], 1)) == 1  # the bonus alone


def test_steps_without_a_call_are_caught_up() -> None:
    session = table_session(prompt=[1])
    for token in (2, 3, 4):
        session.commit(ROOT, [token])
    assert reads(session, lambda: session.expand([ROOT], 1)) == 4
    assert_scores_are_those_of_the_paths(session)


def test_a_long_unread_text_is_read_before_the_tree() -> None:
    session = table_session(prompt=[i % V for i in range(60)])
    model = session.model
    assert isinstance(model, TableModel)
    assert reads(session, lambda: session.expand([ROOT], 3)) == 60
    assert model.forwards == 2  # one for the bulk, one for the rest and the tree
    assert_scores_are_those_of_the_paths(session)


# --- the properties -------------------------------------------------------------------------------

NODE = st.integers(0, 99)  # taken modulo the size of the tree
STEP = st.tuples(
    st.lists(
        st.one_of(
            st.tuples(st.just("hang"), NODE, st.lists(st.integers(0, V - 1), max_size=4)),
            st.tuples(
                st.just("expand"),
                st.lists(NODE, min_size=1, max_size=3, unique=True),
                st.integers(1, 3),
            ),
            st.tuples(st.just("score"), st.none(), st.none()),
        ),
        max_size=5,
    ),
    st.integers(0, 99),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=2),
)


def play(session: Session, steps: Any, check: Any) -> None:
    for acts, accepted, bonus in steps:
        for act, where, what in acts:
            n = session.tree.n_nodes
            if act == "hang" and what:
                session.hang((where % n, what))
            elif act == "expand":
                session.expand(sorted({node % n for node in where}), what)
            elif act == "score":
                check(session)
        session.commit(accepted % session.tree.n_nodes, bonus)
    session.expand([ROOT], 2)
    check(session)


@given(
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=25),
    read_ahead=st.integers(0, 4),
    steps=st.lists(STEP, max_size=4),
)
def test_any_course_of_calls_and_commits_gives_fresh_scores(
    prompt: list[int], read_ahead: int, steps: Any
) -> None:
    """Law 4 and law 6: rejections, skips and other drafters' nodes leave nothing behind."""
    play(table_session(prompt, read_ahead), steps, assert_scores_are_those_of_the_paths)


@pytest.mark.slow
@given(
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=25),
    read_ahead=st.integers(0, 4),
    steps=st.lists(STEP, max_size=6),
)
@settings(settings.get_profile("thorough"))
def test_any_course_of_calls_and_commits_gives_fresh_scores_thoroughly(
    prompt: list[int], read_ahead: int, steps: Any
) -> None:
    play(table_session(prompt, read_ahead), steps, assert_scores_are_those_of_the_paths)


@given(
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=25),
    steps=st.lists(STEP, max_size=4),
)
def test_its_cache_holds_the_committed_text(prompt: list[int], steps: Any) -> None:
    """Law 6: rows of the text are those of a causal prefill, whatever trees came between."""
    session = table_session(prompt)
    play(session, steps, lambda session: session.drafter.score(session.tree))
    session.commit(ROOT, [0])
    drafter, cache = session.drafter, session.drafter._cache
    n_kv = drafter._n_kv
    assert n_kv >= len(session.text) - 1
    assert cache.token[:n_kv].tolist() == session.text[:n_kv]  # type: ignore[attr-defined]
    assert cache.position[:n_kv].tolist() == list(range(n_kv))  # type: ignore[attr-defined]


# --- a real model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> LanguageModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    from treegraft.backends.hf import HFLanguageModel

    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return HFLanguageModel(model.double().eval(), name="llama")


def test_incremental_scores_of_a_llama_equal_fresh_forwards(llama: LanguageModel) -> None:
    """Law 4 in float64, 1e-9 on log q, through three commits of different kinds."""
    session = Session(llama, [1, 2, 3, 4])

    def fresh(tokens: list[int]) -> Tensor:
        cache = llama.new_cache(len(tokens))
        ((_, logits),) = extend(llama, cache, tokens, 0)
        return logits.log_softmax(-1)

    def check(session: Session) -> None:
        session.drafter.score(session.tree)
        rows, rank = session.drafter._logq, session.drafter._rank
        for node in range(session.tree.n_nodes):
            if rank[node] >= 0:
                expected = fresh(session.text + session.tree.path(node))[-1]
                # log q is handed out in float32; its rounding is all that may differ.
                torch.testing.assert_close(rows[rank[node]], expected.float(), rtol=2e-7, atol=0)

    session.hang((ROOT, [1, 2, 3]), (ROOT, [4, 5]))
    session.expand([ROOT, 2], 3)
    check(session)
    session.commit(node=4, bonus=[6])  # a second branch: its rows must move
    session.expand([ROOT], 2)
    check(session)
    session.commit(ROOT, [0])  # everything rejected
    session.commit(ROOT, [1, 2])  # a step in which it was not called
    session.hang((ROOT, [3, 3, 3]))
    check(session)
    session.commit(node=3, bonus=[5])  # a first chain: nothing to move
    session.expand([ROOT], 2)
    check(session)

    # Law 6 in float64: keys and values equal those of a fresh causal prefill.
    n_kv = len(session.text)
    cache = llama.new_cache(n_kv)
    for _ in extend(llama, cache, session.text, 0):
        pass
    for ours, theirs in zip(session.drafter._cache.layers, cache.layers, strict=True):
        for kind in ("keys", "values"):
            torch.testing.assert_close(
                getattr(ours, kind)[:, :, :n_kv],
                getattr(theirs, kind)[:, :, :n_kv],
                rtol=0,
                atol=1e-9,
            )


# --- edges ----------------------------------------------------------------------------------------


def test_a_width_beyond_the_vocabulary_proposes_everything_once() -> None:
    session = table_session()
    proposals = session.drafter.propose(session.tree, torch.tensor([ROOT]), 50)
    assert sorted(proposals.tokens[:, 0].tolist()) == list(range(V))


def test_a_smaller_vocabulary_leaves_the_other_tokens_unscored() -> None:
    session = Session(hashed_model(4, seed=5, order=3), [1, 2, 3])
    session.hang((ROOT, [1]), (ROOT, [5]))
    scores = session.drafter.score(session.tree)
    assert torch.isfinite(scores[1])
    assert scores[2] == -torch.inf


def test_an_id_beyond_the_drafters_vocabulary_is_never_read() -> None:
    """An embedding would fail on it: in the prompt, in the text, in the tree and in a long text."""

    class Embedding(TableModel):
        def forward(self, cache: Any, tokens: Tensor, *rest: Any, **options: Any) -> Tensor:
            assert int(tokens.max()) < self.vocab_size, "index out of range in self"
            return super().forward(cache, tokens, *rest, **options)

    small = Embedding(hashed_model(4, seed=5, order=3).logits, 4)
    for prompt in ([1, 6, 2, 5], [6] * 60):
        session = Session(small, prompt)
        session.hang((ROOT, [5, 1, 6]), (ROOT, [2]))
        session.expand([1, 2, 3], 2)
        session.commit(node=3, bonus=[6])
        session.expand([ROOT], 2)
        assert session.tree.n_nodes == 3


def test_a_tree_larger_than_the_cache_grows_it() -> None:
    session = table_session()
    session.drafter.begin(Context((1, 2, 3), 3, V, None))
    frontier = [ROOT]
    for _ in range(4):
        first = session.tree.n_nodes
        session.expand(frontier, 4)
        frontier = list(range(first, session.tree.n_nodes))
    assert session.tree.n_nodes > 3 + 64
    assert_scores_are_those_of_the_paths(session)


def test_a_failed_cache_leaves_no_row_count_behind() -> None:
    """Out of memory once: the next text must open a cache, not trust one that never came."""
    model = hashed_model(V, seed=5)
    drafter = LmDrafter(LmConfig(model="m"), model)
    opened = model.new_cache

    def fail(n_rows: int, old: Any = None) -> Any:
        raise MemoryError

    model.new_cache = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        drafter.begin(Context((1, 2), 100, V, None))
    model.new_cache = opened  # type: ignore[method-assign]
    drafter.begin(Context((1, 2), 50, V, None))
    tree = TensorTree(V)
    tree.reset_(2, 9)
    assert drafter.propose(tree, torch.tensor([ROOT]), 2).tokens.shape == (2, 1)


def test_a_cache_that_failed_to_grow_is_not_gone_on_with() -> None:
    """The smaller cache was handed over to the larger one: what is left of it is not to be used."""
    session = table_session()
    drafter, model = session.drafter, session.model
    opened = model.new_cache

    def fail(n_rows: int, old: Any = None) -> Any:
        opened(n_rows, old)
        raise MemoryError

    session.hang(*((ROOT, [token] * 60) for token in range(5)))
    model.new_cache = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        drafter.score(session.tree)
    model.new_cache = opened  # type: ignore[method-assign]
    drafter.begin(Context((1, 2, 3), 3, V, None))
    session.tree.reset_(3, 64)
    session.hang((ROOT, [1, 2]))
    assert_scores_are_those_of_the_paths(session)


def test_no_position_gives_no_proposal() -> None:
    session = table_session()
    proposals = session.drafter.propose(session.tree, torch.tensor([], dtype=torch.int64), 3)
    proposals.check(1)
    assert proposals.tokens.shape[0] == 0


def test_a_lone_root_asks_for_no_reading() -> None:
    session = table_session()
    assert reads(session, lambda: session.drafter.score(session.tree)) == 0
