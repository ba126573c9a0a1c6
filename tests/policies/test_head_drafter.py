"""The head drafter: what it says, what it reads, and that no head changes a token.

A table head asserts at every forward that the state before each token is that of the text before it
(table_models.py), so a state of another place, of an old step or of a rejected branch fails there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from table_models import TableHead, TableModel, hashed_model, mixed_model, state_of
from torch import Tensor

from treegraft.backends.reference import plain_tokens
from treegraft.backends.tensor_tree import TensorTree
from treegraft.composition import component_graph
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError, DrafterError, UnsupportedModelError
from treegraft.core.roles import Commit, Context
from treegraft.core.sampling import Sampling
from treegraft.core.tree import ROOT, Proposals
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.drafters.head import HeadConfig, HeadDrafter

V = 7
PROMPT = [1, 2, 3, 1]


def states(text: Sequence[int], first: int, last: int) -> Tensor:
    """The target's states behind places first..last-1."""
    rows = [state_of(text[: place + 1]) for place in range(first, last)]
    return torch.stack(rows) if rows else torch.empty(0, 3)


class Session:
    """A drafter beside the tree and the text that it is told about."""

    def __init__(self, prompt: Sequence[int] = PROMPT, read_ahead: int = 0) -> None:
        self.head = TableHead(hashed_model(V, seed=5, order=3))
        self.text = list(prompt)
        self.drafter = HeadDrafter(HeadConfig(model="h", read_ahead=read_ahead), self.head)
        hidden = states(self.text, 0, len(self.text) - 1)
        self.drafter.begin(Context(tuple(prompt), 200, V, None, hidden=hidden))
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

    def commit(self, node: int, bonus: int) -> None:
        """Accept the path down to ``node``, then the bonus."""
        lineage = self.tree.ancestors(torch.tensor([node]))[0].nonzero()[:, 0].tolist()
        tokens = [*self.tree.path(node), bonus]
        first = len(self.text) - 1
        self.text += tokens
        hidden = states(self.text, first, len(self.text) - 1)
        self.drafter.observe(Commit(tuple(tokens), tuple(lineage[1:]), None, hidden=hidden))
        self.tree.reset_(self.text[-1], 64)

    def reads(self, act: Any) -> tuple[int, int]:
        """Tokens that went through the head, and passes."""
        before = self.head.reads, self.head.forwards
        act()
        return self.head.reads - before[0], self.head.forwards - before[1]

    def check_scores(self) -> None:
        """Every score is what the head says of the bare text."""
        scores = self.drafter.score(self.tree)
        parent, token = self.tree.parent.tolist(), self.tree.token.tolist()
        for node in range(1, self.tree.n_nodes):
            said = self.head.model.logits(self.text + self.tree.path(parent[node]))
            expected = said.log_softmax(-1)[token[node]]
            torch.testing.assert_close(scores[node], expected, rtol=0, atol=1e-6)


def pipeline(head: TableHead, target: TableModel, **options: Any) -> Pipeline:
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram"}, {"kind": "head", "model": "h"}],
        "builder": {"kind": "layered", "depth": 4, "width": 2, "budget": 12},
        "scheduler": {"kind": "always"},
        "stop": {"max_new_tokens": 20, "eos": []},
        **options,
    }
    return build_pipeline(parse_config(config), {"t": target, "h": head})


def plain(target: TableModel, n: int = 20, **sampling: Any) -> list[int]:
    return plain_tokens(target.logits, PROMPT, n, Sampling(**sampling))


# --- the story ------------------------------------------------------------------------------------


def test_it_proposes_what_the_head_thinks_likely() -> None:
    session = Session()
    proposals = session.drafter.propose(session.tree, torch.tensor([ROOT]), 3)
    top = session.head.model.logits(PROMPT).log_softmax(-1).topk(3)
    assert proposals.tokens[:, 0].tolist() == top.indices.tolist()
    torch.testing.assert_close(proposals.logprobs[:, 0], top.values, rtol=0, atol=1e-6)


def test_it_scores_what_others_proposed_on_its_own_states() -> None:
    session = Session()
    session.hang((ROOT, [1, 2, 3]), (ROOT, [1, 4]), (ROOT, [6]))
    session.check_scores()


def test_a_head_that_is_right_is_accepted_whole() -> None:
    target = hashed_model(V, seed=1)
    result = pipeline(TableHead(replace(target)), target).generate(PROMPT)
    assert result.tokens == plain(target)
    assert [step.n_new for step in result.steps] == [5, 5, 5, 5]
    assert result.statistics.calls == (0, 16)
    assert result.statistics.accepted[1] == 16


# --- law 4: what came before leaves no trace ------------------------------------------------------


@pytest.mark.parametrize("read_ahead", [0, 32])
def test_scores_are_those_of_the_text_after_any_commits(read_ahead: int) -> None:
    session = Session(read_ahead=read_ahead)
    session.hang((ROOT, [1, 2, 3]), (ROOT, [4, 5]))
    session.check_scores()
    session.commit(node=4, bonus=0)  # level by level: 1=[1] 2=[4] 3=[1,2] 4=[4,5]
    session.expand([ROOT], 2)
    session.expand([1, 2], 2)
    session.check_scores()
    session.commit(node=3, bonus=2)
    session.commit(node=ROOT, bonus=5)
    session.hang((ROOT, [3, 3]))
    session.check_scores()


def test_a_prompt_of_one_token_has_no_state_before_it() -> None:
    session = Session(prompt=[4])
    session.expand([ROOT], 2)
    session.check_scores()


def test_steps_without_a_call_are_caught_up_however_many() -> None:
    session = Session(prompt=[1])
    for step in range(40):
        session.commit(node=ROOT, bonus=step % V)
    session.expand([ROOT], 2)
    session.check_scores()


# --- what goes through the head -------------------------------------------------------------------


def test_accepted_nodes_are_read_again_on_the_targets_states_with_the_next_root() -> None:
    session = Session()
    session.hang((ROOT, [1, 2, 3]))
    # The text, the root and two inner nodes: three depths of the draft in three passes.
    assert session.reads(lambda: session.drafter.score(session.tree)) == (len(PROMPT) + 2, 3)
    session.commit(node=3, bonus=4)
    assert session.reads(lambda: session.expand([ROOT], 2)) == (4, 1)
    assert session.reads(lambda: session.drafter.score(session.tree)) == (0, 0)
    assert session.reads(lambda: session.expand([1, 2], 2)) == (2, 1)


def test_a_root_that_was_read_is_not_read_again() -> None:
    session = Session()
    session.expand([ROOT], 2)
    session.commit(node=ROOT, bonus=6)
    assert session.reads(lambda: session.expand([ROOT], 1)) == (1, 1)


# --- no head changes a token ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("calls", [[1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 1]])
@pytest.mark.parametrize("leftover", [False, True])
def test_tokens_are_the_targets_in_any_schedule(
    temperature: float, calls: list[int], leftover: bool
) -> None:
    target = hashed_model(V, seed=1)
    head = TableHead(mixed_model(target, hashed_model(V, seed=9), 0.4))
    made = pipeline(head, target, scheduler={"kind": "fixed", "calls": calls}, leftover=leftover)
    for seed in range(3):
        result = made.generate(PROMPT, temperature=temperature, seed=seed)
        assert result.tokens == plain(target, temperature=temperature, seed=seed)
        assert result.statistics.calls[1] > 0


class Blind(TableHead):
    """A head that looks at no state, so that the target may hand out any."""

    def forward(self, cache: Any, tokens: Tensor, states: Tensor, *where: Any) -> Any:
        return states + tokens[:, None], (states.sum(1)[:, None] * torch.arange(V)).sin() * 3


class Stale(TableModel):
    """A target whose states are those of its first forward, or not even numbers."""

    def forward_hidden(self, *read: Any) -> tuple[Tensor, Tensor]:
        logits, hidden = super().forward_hidden(*read)
        return logits, hidden[:1].expand_as(hidden) * self.spoiled

    spoiled = 1.0


@pytest.mark.parametrize("spoiled", [1.0, float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_targets_whatever_its_states_are(spoiled: float, temperature: float) -> None:
    sound = hashed_model(V, seed=1)
    target = Stale(sound.logits, V)
    target.spoiled = spoiled
    made = pipeline(Blind(sound), target)
    for _ in range(2):
        result = made.generate(PROMPT, temperature=temperature)
        assert result.tokens == plain(sound, temperature=temperature)
        assert result.statistics.calls[1] > 0


def test_drawn_children_keep_their_draws() -> None:
    """As for any model: under walk the tokens stay, and what was drawn is in the ledger."""
    target = hashed_model(V, seed=1)
    head = {"kind": "head", "model": "h", "children": "sample"}
    for verifier in ("walk", "ledger"):
        made = pipeline(
            TableHead(target),
            target,
            drafters=[head],
            verifier={"kind": verifier},
            sampling={"temperature": 1.0},
        )
        assert made.config.same_tokens == (verifier == "walk")
        chunks = list(made.stream(PROMPT))
        assert any(c.tree.ledger is not None and len(c.tree.ledger.node) for c in chunks)
        if verifier == "walk":
            assert chunks[-1].generation is not None
            assert chunks[-1].generation.tokens == plain(target, temperature=1.0)


def test_past_its_context_the_next_cheaper_drafter_acts() -> None:
    target = hashed_model(V, seed=1)
    head = TableHead(target, max_positions=len(PROMPT) + 6)
    result = pipeline(head, target).generate(PROMPT)
    assert result.tokens == plain(target)
    assert min(result.statistics.calls) > 0
    (notice,) = result.notices
    assert notice.startswith("drafter 'h' is left out where text and draft tree pass its context")


# --- what fits and what is refused ----------------------------------------------------------------


def test_the_graph_shows_that_it_asks_for_states() -> None:
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram"}, {"kind": "head", "model": "some/where"}],
    }
    graph = component_graph(parse_config(config))
    assert graph.edges["target", "drafter:where"]["flow"] == "hidden states"
    assert graph.edges["target", "drafter:ngram"]["flow"] == "TargetTop"
    assert graph.nodes["drafter:where"]["scoring"]
    assert graph.nodes["drafter:where"]["options"]["model"] == "some/where"


def test_a_target_without_states_is_refused_by_name() -> None:
    target = hashed_model(V, seed=1)
    target.hidden_size = None
    asks = {
        "kind": "adversarial_drafters:Recorder",
        "params": {"target_top": None, "vocab_size": V, "target_hidden": True},
    }
    message = "drafter 'Recorder' asks for hidden states, and target 'hashed-1' hands out none"
    with pytest.raises(UnsupportedModelError, match=message):
        pipeline(TableHead(target), target, drafters=[asks])
    with pytest.raises(UnsupportedModelError, match="'hashed-1' hands out no hidden states"):
        TableModel.__mro__[1].forward_hidden(target, None, *[torch.zeros(1)] * 4)


def test_a_head_of_another_width_is_refused_by_name() -> None:
    target = hashed_model(V, seed=1)
    message = (
        r"head 'h' has \(vocabulary, hidden states\) of widths \(7, 4\), target 't' has \(7, 3\)"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        pipeline(TableHead(target, hidden_size=4), target)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"kind": "head", "model": "t"}, "'t' is a language model: name it as model of kind lm"),
        ({"kind": "lm", "model": "h"}, "'h' is a draft head: name it as model of kind head"),
        ({"kind": "head", "model": "no/where"}, "head 'no/where': no head.json there"),
        ({"kind": "head", "model": "zoo:small"}, "the zoo's only draft head is zoo:head"),
    ],
)
def test_a_name_that_is_no_heads_is_refused_before_anything_loads(
    drafter: dict[str, Any], message: str
) -> None:
    target = hashed_model(V, seed=1)
    with pytest.raises(ConfigError, match=message):
        pipeline(TableHead(target), target, drafters=[drafter])


def test_a_head_does_not_ride_along() -> None:
    target = hashed_model(V, seed=1)
    with pytest.raises(ConfigError, match="ride_along takes drafters that do not score"):
        pipeline(TableHead(target), target, ride_along=["h"])


def test_a_head_that_is_told_no_states_says_so() -> None:
    drafter = HeadDrafter(HeadConfig(model="h"), TableHead(hashed_model(V, seed=1)))
    with pytest.raises(ValueError, match="found none in the context"):
        drafter.begin(Context(tuple(PROMPT), 20, V, None))
    drafter.begin(Context((1,), 20, V, None, hidden=torch.empty(0, 3)))
    with pytest.raises(ValueError, match="found none in the commit"):
        drafter.observe(Commit((1,), (), None))


def test_a_head_that_fails_is_named_and_the_pipeline_stays_usable() -> None:
    target = hashed_model(V, seed=1)
    head = TableHead(target)
    made = pipeline(head, target)
    working = head.forward
    head.forward = None  # type: ignore[assignment, method-assign]
    with pytest.raises(DrafterError, match="drafter 'h' failed in propose: TypeError"):
        made.generate(PROMPT)
    head.forward = working  # type: ignore[method-assign]
    assert made.generate(PROMPT).tokens == plain(target)
