"""The roles that a pipeline is composed of. Each is an ABC; implementations are final.

Data flows one way within a layer: Scheduler -> Drafter -> GraftPolicy (through TreeBackend
operations) -> TreeBuilder; after the last layer TreeBuilder -> Verifier -> commit. Shapes: N nodes
of the working tree, K paths, C tokens of a path, W frontier width, n committed tokens of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from treegraft.core.offers import Hindsight, Offers
from treegraft.core.sampling import DRAWS, TargetDistribution
from treegraft.core.stats import StepRecord
from treegraft.core.tree import Proposals, TokenTree, Verdict


@dataclass(frozen=True, slots=True)
class TargetTop:
    """The target's raw distribution (before sampling settings) at some places of the text.

    Attributes
    ----------
    chosen : float32 [n], log p in nats of the token that stands at each place.
    tokens : int64 [n, k], the k likeliest tokens there; k is what the drafters asked for.
    logprobs : float32 [n, k], their log p in nats, falling.
    """

    chosen: Tensor
    tokens: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class TreeTop:
    """The target's raw distribution behind every node of the tree that it just read.

    Attributes
    ----------
    token : int64 [N], the nodes' tokens, the root's first; rejected nodes are among them.
    tokens : int64 [N, k], the k likeliest tokens after each node, given its own path.
    logprobs : float32 [N, k], their log p in nats, falling.
    """

    token: Tensor
    tokens: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """What a drafter is told when a text begins.

    Attributes
    ----------
    tokens : the prompt's ids, at least one.
    capacity : most tokens the text can come to hold, prompt included.
    vocab_size : number of ids that may be proposed; others are dropped.
    top : the target at places 1..len(tokens)-1, or None if no drafter asked or there are none.
    hidden : float [len(tokens) - 1, d] on the target's device in its dtype, the target's hidden
        states behind places 0..len(tokens)-2, so that row j is what row j of ``top`` was made of
        and says what stands at place j + 1; None if no drafter asked.
    temperature, seed : those of the text's sampling, for drafters that draw.
    stream : which stream of the seeded noise is the drafter's own (``sampling.keyed_gumbel``); one
        that draws must use no other, and least of all the target's.
    """

    tokens: Sequence[int]
    capacity: int
    vocab_size: int
    top: TargetTop | None
    temperature: float = 0.0
    seed: int = 0
    stream: int = DRAWS
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """What a drafter is told when tokens were committed.

    Attributes
    ----------
    tokens : the new ids: the accepted path, then the bonus token (possibly cut by a stop).
    path : the accepted nodes as numbered in the working tree, top down, without the root; node
        ``path[j]`` holds ``tokens[j]``.
    top : the target at the places of ``tokens``, or None if no drafter asked.
    tree_top : the target behind every node that it read, or None if no drafter asked.
    hidden : float [n, d] as in ``Context``: row j is the target's hidden state that ``tokens[j]``
        was taken from, the one behind the token before it; row 0 stands behind the tree's root and
        row j behind node ``path[j - 1]``. None if no drafter asked.
    """

    tokens: Sequence[int]
    path: Sequence[int]
    top: TargetTop | None
    tree_top: TreeTop | None = None
    hidden: Tensor | None = None


class NodeLists(NamedTuple):
    """Columns of a working tree as Python sequences [N]; see ``TreeBackend``."""

    token: Sequence[int]
    parent: Sequence[int]
    depth: Sequence[int]
    logprob: Sequence[float]
    alive: Sequence[bool]
    source: Sequence[int]
    proposers: Sequence[int]


class TreeBackend(ABC):
    """The working tree of one decoding step, and every operation a policy may ask of it.

    Nodes are numbered in the order they were added, so a parent's number is below its child's. The
    columns (``token``, ``parent``, ...) may be views of the tree's own memory: read them, and write
    through the operations only.
    Two implementations give equal results: ``backends/reference.py`` (networkx, the specification)
    and ``backends/tensor_tree.py``.
    """

    @property
    @abstractmethod
    def n_nodes(self) -> int:
        """Number of nodes, the root included (N)."""

    @property
    @abstractmethod
    def token(self) -> Tensor:
        """int64 [N]."""

    @property
    @abstractmethod
    def parent(self) -> Tensor:
        """int64 [N]; the root is its own parent."""

    @property
    @abstractmethod
    def depth(self) -> Tensor:
        """int64 [N], edges from the root."""

    @property
    @abstractmethod
    def logprob(self) -> Tensor:
        """float32 [N], log probability of the path in nats; -inf where a part is unscored."""

    @property
    @abstractmethod
    def source(self) -> Tensor:
        """int64 [N], drafter that proposed the node first; NOBODY for the root."""

    @property
    @abstractmethod
    def scorer(self) -> Tensor:
        """int64 [N], drafter that last scored the node's token; NOBODY if none has."""

    @property
    @abstractmethod
    def proposers(self) -> Tensor:
        """int64 [N], every drafter that proposed the node: bit i is drafter i; 0 for the root."""

    @property
    @abstractmethod
    def alive(self) -> Tensor:
        """bool [N], False for a node that ``keep_`` took out and nobody has proposed since."""

    @property
    @abstractmethod
    def leaf(self) -> Tensor:
        """bool [N], nodes that are alive and have no child that is."""

    def lists(self) -> NodeLists:
        """Columns as Python sequences: for a dozen nodes a loop costs less than a call of torch.

        Not to be written to, nor to be kept past the next operation on the tree.
        """
        columns = (self.token, self.parent, self.depth, self.logprob, self.alive)
        more = (self.source, self.proposers)
        return NodeLists(*(column.tolist() for column in (*columns, *more)))

    @abstractmethod
    def path(self, node: int) -> list[int]:
        """Tokens from the root's child down to ``node``."""

    @abstractmethod
    def ancestors(self, nodes: Tensor) -> Tensor:
        """bool [k, N] for ``nodes`` int64 [k]: which nodes lie on each one's path, both ends in."""

    @abstractmethod
    def reset_(self, token: int, max_depth: int, budget: int | None = None) -> None:
        """Start over with a root that holds ``token``; nodes below ``max_depth`` are refused.

        ``budget`` is what the tree will be pruned to (None: no limit); see ``add_``.
        """

    @abstractmethod
    def reroot_(self, node: int, max_depth: int, budget: int | None = None) -> None:
        """Start over as ``reset_`` does, with ``node`` as the root and what hangs below it.

        Scores, sources and scorers stay; nobody counts as having expanded any of it. Nodes are
        numbered anew in their old order; those below ``max_depth`` go. TreeError if ``node`` is
        none of the tree's, or if something was drawn, whose ledger would be lost.
        """

    @abstractmethod
    def add_(self, proposals: Proposals, source: int, overwrite: bool) -> Tensor:
        """Hang paths into the tree, merging what is already there; nothing is removed.

        A token out of the vocabulary, or below ``max_depth``, ends its path. Where several paths
        of one call score one node, the highest score counts. A node that exists keeps its source
        and gets one more proposer; its score is replaced if ``overwrite`` (a scoring drafter
        speaks), else only filled in where it had none. A node that was taken out comes back as a
        new one would, under its old number. TreeError if a path hangs under a node that was taken
        out.

        A node under which something is drawn must be verified, or the draw would have been wasted
        on a condition (docs/losslessness.md). So it is kept by ``prune``, and draws are refused
        under nodes that the budget could not keep; that depends on the node, never on the token.

        Returns
        -------
        int64 [K, C], the node that holds each token, -1 where there is none.
        """

    @abstractmethod
    def rescore_(self, logprobs: Tensor, source: int) -> None:
        """Replace every node's own log q by ``logprobs`` float32 [N] (root ignored), top down."""

    @abstractmethod
    def keep_(self, nodes: Tensor) -> None:
        """Take out every node but ``nodes`` int64 [k] and those above them.

        What was drawn stays (docs/losslessness.md): nodes under which something was drawn are kept
        with their ancestors, and a drawn token keeps its slot in the ledger. Nodes that are taken
        out keep their numbers, and their places in the columns; no operation finds them until they
        are proposed again. TreeError where ``nodes`` are none of the tree's.
        """

    @abstractmethod
    def best(
        self, width: int, min_depth: int, max_depth: int, unvisited_by: int | None = None
    ) -> Tensor:
        """int64 [<= width]: best-scored nodes within the depths, best first, oldest on ties.

        With ``unvisited_by``, nodes under which that drafter already hung paths are left out.
        """

    @abstractmethod
    def rank(self, nodes: Tensor, match: Tensor, width: int) -> Tensor:
        """int64 [<= width]: the best of ``nodes`` int64 [k], each once.

        Longest ``match`` int64 [k] first, then logprob, then the oldest node. A node that occurs
        twice counts with its longest match; -1 is no node and is passed over.
        """

    @abstractmethod
    def prune(self, budget: int) -> TokenTree:
        """The root and the ``budget`` best nodes, closed under ancestors, parents first.

        Nodes under which something was drawn go before all others; TreeError if ``budget`` is
        below their number.
        """

    @property
    @abstractmethod
    def n_drawn(self) -> int:
        """Number of draws that the tree holds; each must be in the pruned tree's ledger."""

    def learn_(self, path: Sequence[int], tokens: Sequence[int]) -> None:  # noqa: B027
        """The step is over: what was committed, as in ``Commit``. Most trees learn nothing.

        Called at most once between two resets, and only where the tree holds the step's draft.
        """


class Drafter(ABC):
    """Proposes continuations.

    Attributes
    ----------
    All are read when the pipeline is built.

    target_top : how many of the target's top tokens it wants to see at every place of the text (0:
        only the logprob of the token that stands there; None: it does not look at the target).
    tree_top : whether it wants those top tokens behind every node of the verified tree too,
        rejected ones included; needs ``target_top``.
    target_hidden : whether it wants the target's hidden states at the places of the text. Targets
        without any (``LanguageModel.hidden_size``) are then refused.
    limit : longest text in tokens that it can draft for, or None. Past it the pipeline calls the
        next cheaper drafter instead, and says so once.
    """

    target_top: int | None = None
    tree_top: bool = False
    target_hidden: bool = False
    limit: int | None = None

    @abstractmethod
    def begin(self, context: Context) -> None:
        """Forget the last text and start on a new one."""

    @abstractmethod
    def observe(self, commit: Commit) -> None:
        """Take note of committed tokens; called after each step but the last of a text."""

    @abstractmethod
    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        """At most ``width`` paths under each node of ``positions`` int64 [k]."""

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers | None:
        """What it would have proposed along a verified path, as far as it knows without a forward.

        Schedulers with ``asks_offers`` learn from it. Called when a step was verified, before
        ``observe``, whether or not the drafter acted; it must change nothing that is drafted.
        ``path`` holds nodes of the working tree: the root, then accepted ones, top down. At most
        ``width`` paths a place. None, the default: it never tells.
        """
        return None


class ScoringDrafter(Drafter):
    """A drafter that can say how likely any node is, whoever proposed it."""

    @abstractmethod
    def score(self, tree: TreeBackend) -> Tensor:
        """float32 [N]: log q(token of node | its path) in nats; the root's entry is ignored."""


@dataclass(frozen=True, slots=True)
class Touched:
    """The children that a layer made or touched.

    Attributes
    ----------
    nodes : int64 [k], with repeats where two paths led to one child, -1 where none was made.
    match : int64 [k], the match length each came with (0 from a model).
    """

    nodes: Tensor
    match: Tensor


class GraftPolicy(ABC):
    """What one drafter's visit does to the tree: one layer of drafting."""

    @abstractmethod
    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Tensor, width: int
    ) -> Touched:
        """Let ``drafter`` (number ``index``) act on the tree, drafting from ``frontier`` int64 [k].

        Each position gets at most ``width`` paths. A visit that chooses its own positions takes at
        most ``width`` of them.
        """

    # Not abstract: most policies have done their work with the last layer.
    def finish(
        self,
        tree: TreeBackend,
        drafters: Mapping[int, Drafter],
        calls: Sequence[int],
        width: int,
        budget: int,
    ) -> Sequence[int]:
        """Act on the whole tree after the last layer and before it is pruned to ``budget`` nodes.

        ``drafters`` are those whose context has room, by number; ``calls`` says who acted in each
        layer. Steps in which nobody acted are not finished.

        Returns
        -------
        Numbers of the drafters that it called, one entry per call; none by default.
        """
        return ()


class TreeBuilder(ABC):
    """The shape of the tree: how deep, how wide, what is drafted next, what is verified.

    ``depth`` is the number of drafting layers, ``width`` W, ``budget`` the most nodes that are
    verified besides the root (B).
    """

    depth: int
    width: int
    budget: int

    @abstractmethod
    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> Tensor | None:
        """int64 [k]: where the next layer drafts, given what ``layer`` (from 1) touched.

        Empty if the layer touched nothing; the frontier then stays as it was. None if the tree is
        complete and no further layer is wanted.
        """

    @abstractmethod
    def prune(self, tree: TreeBackend) -> TokenTree:
        """The part of the tree that the target will read."""

    # Not abstract: most builders look at the tree alone.
    def drafted(self, seconds: float, n_text: int) -> None:  # noqa: B027
        """A step's drafting is over, right before ``prune``: wall time that it took, and committed
        tokens. A builder that goes by the clock drafts otherwise from run to run.
        """

    def finish(self, record: StepRecord) -> None:  # noqa: B027
        """A step is over; a builder that learns may do so from finished steps only."""


@dataclass(frozen=True, slots=True)
class DraftState:
    """What a scheduler may look at before a layer.

    Attributes
    ----------
    layer : the layer to come, from 1. depth : number of layers.
    calls : the drafter that acted in each earlier layer of this step.
    n_drafters : how many there are, cheapest first.
    n_prompt, n_committed : tokens of the prompt, and of the text so far (prompt included).
    tree, frontier : the tree as it stands, and int64 [k] where the next layer would draft.
    reached : how many children each earlier layer handed on as the frontier; 0 where it found
        nothing, and the frontier stayed as it was.
    text : the committed text; the same list, longer, in every step of a text. Not to be written to.
    """

    layer: int
    depth: int
    calls: tuple[int, ...]
    n_drafters: int
    n_prompt: int
    n_committed: int
    tree: TreeBackend
    frontier: Tensor
    reached: tuple[int, ...] = ()
    text: Sequence[int] = ()


class Scheduler(ABC):
    """Decides layer by layer which drafter acts.

    Attributes
    ----------
    asks_offers : whether ``hindsight`` is to be called. Drafters that never tell what they would
        have proposed (``Drafter.offers``) are then refused by name.
    """

    asks_offers: bool = False

    @abstractmethod
    def choose(self, state: DraftState) -> int | None:
        """Number of the drafter to call in this layer, or None to stop drafting."""

    @abstractmethod
    def finish(self, record: StepRecord) -> None:
        """A step is over; a scheduler that learns may do so from finished steps only."""

    def hindsight(self, hindsight: Hindsight) -> None:  # noqa: B027
        """What every drafter would have proposed in a step; called before its ``finish``."""


class Verifier(ABC):
    """Decides which path of the tree is committed.

    Attributes
    ----------
    in_text_order : it asks for the target's distribution at the places of the text one by one, each
        once, and commits what it asked about: what a logits processor that keeps state needs. Where
        False, such processors are refused.
    needs_ledger : it relies on the ledger of a tree in which something was drawn, so a builder must
        not leave any draw out of it; ``TreeBackend.prune`` does not.
    """

    in_text_order: bool = False
    needs_ledger: bool = False

    @abstractmethod
    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        """Walk the tree under the target's processed distribution."""
