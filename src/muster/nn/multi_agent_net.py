"""The networks of several agents as one module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from muster.arguments import as_whole
from muster.errors import ConfigError, SpecMismatch, WrongIndex, WrongType
from muster.nn.alike import require_alike
from muster.nn.fast_call import does_more, has_backward_hooks, run_layers
from muster.nn.lazy_inputs import LazyInputs
from muster.nn.stacked import StackedLinear, StackedSequential, stack_known
from muster.nn.vmapped import call_each, call_one, call_one_by_one, copy_module, split_any, stack_any

# The places of weights in TorchRL's state dicts: with use_td_params=True, where `_empty_net` has only what is not used,
# and with False.
_TORCHRLS_PLACES = ("params.", "_empty_net.")


class MultiAgentNet(nn.Module):
    """A network for each of ``n_agents`` agents, or one that they share.

    Input ``[*B, A, *F]``, output ``[*B, A, *G]``, where the single network maps ``[batch, *F]`` to ``[batch, *G]``.
    Networks with a ``forward`` of several tensors are called with several inputs; for others the inputs are
    concatenated along their last axis.

    make_net: called without arguments for each agent's network, once if ``share_params``; builds a new one each time.
    n_agents: ``A``.
    centralised: every agent sees all agents' inputs, joined along the first axis of ``F``.
    share_params: one network for all agents, which is ``net`` itself; if centralised too, all agents' outputs are
        equal and computed once.
    agent_dim: the axis of ``A`` in the input, counted from the end: -2 for vectors, -4 for images.
    use_vmap: False calls networks with other layers than the known ones one after the other. This is for networks that
        ``torch.vmap`` cannot run: recurrent layers such as ``nn.GRU``, branches that depend on values.
    vmap_randomness: whether what layers draw is "different" for each agent or the "same"; "error" refuses to draw.

    The parameters are ``net.<name>``, under the names of the single network. Unless shared, each has the agents in
    front, ``[A, ...]``; of a linear layer in an ``nn.Sequential`` of known layers (linear, convolution, flatten and the
    usual activations) the weight is ``[A, in, out]``. ``load_state_dict`` reads those of
    TorchRL's networks, ``params.<name>``, too. Other networks run under ``torch.vmap``,
    by one thread at a time. So do those with hooks or a ``forward`` of their own, which then see tensors that they may
    use and change, but not keep; with backward hooks the networks are called one after the other. Blocks inside them
    may not be under ``torch.utils.checkpoint``, which would recompute them with all agents' tensors; the whole module
    may.

    Raises ConfigError and WrongType for bad arguments, SpecMismatch where the networks differ in more than their values
    (options count where their ``repr`` shows them, others are taken from the first) or, in calls, the input's shape
    does not fit, UsageError where they share tensors or keep references to their own (in a list or function, for
    example), CannotTravel where a network of other layers cannot be copied.

    >>> import torch
    >>> from muster.nn import MultiAgentNet
    >>> net = MultiAgentNet(lambda: torch.nn.Linear(4, 2), n_agents=3)
    >>> net(torch.zeros(8, 3, 4)).shape, net.net.weight.shape
    (torch.Size([8, 3, 2]), torch.Size([3, 2, 4]))
    """

    net: nn.Module
    lazy_inputs: LazyInputs | None = None  # what completes it, where the input size is not known yet

    def __init__(
        self,
        make_net: Callable[[], nn.Module],
        n_agents: int,
        *,
        centralised: bool = False,
        share_params: bool = False,
        agent_dim: int = -2,
        use_vmap: bool = True,
        vmap_randomness: str = "different",
    ) -> None:
        super().__init__()
        if isinstance(make_net, nn.Module) or not callable(make_net):
            raise WrongType(
                f"make_net is a {type(make_net).__qualname__}; expected a function that builds one agent's network, "
                "such as lambda: nn.Linear(4, 2). MultiAgentNet.from_modules takes networks that exist; for one that "
                "all agents share give lambda: net and share_params=True"
            )
        if (as_whole(n_agents) or 0) < 1:
            raise ConfigError(f"n_agents={n_agents!r} is not a positive integer")
        if agent_dim > -2:
            raise ConfigError(f"agent_dim={agent_dim} is not the axis of the agents counted from the end: -2 or less")
        self.n_agents, self.agent_dim = int(n_agents), agent_dim
        self.centralised, self.share_params = centralised, share_params
        self.use_vmap, self.vmap_randomness = use_vmap, vmap_randomness
        modules: list[Any] = [make_net() for _ in range(1 if share_params else n_agents)]
        for module in modules:
            if not isinstance(module, nn.Module):
                kind = type(module).__qualname__
                raise WrongType(f"expected a torch.nn.Module for each agent, got a {kind}; does make_net return one?")
        self._takes_several = _takes_several(modules[0])
        self.n_agent_inputs = _input_size(modules[0], n_agents if centralised else 1)
        if share_params:
            self.net = modules[0]
        else:
            require_alike(modules)
            # Of known layers, which draw for all agents at once, only dropout draws.
            draws_alike = vmap_randomness != "different" and any(
                isinstance(p, nn.Dropout) for p in modules[0].modules()
            )
            known = None if draws_alike else stack_known(modules, agent_dim)
            self.net = known or stack_any(modules)

    @staticmethod
    def from_modules(
        modules: Sequence[nn.Module], *, centralised: bool = False, agent_dim: int = -2, use_vmap: bool = True
    ) -> MultiAgentNet:
        """One network for each of the `modules`, in their order, starting from copies of their values.

        Other options are `MultiAgentNet`'s.
        """
        modules = list(modules)
        take = iter(modules).__next__
        return MultiAgentNet(take, len(modules), centralised=centralised, agent_dim=agent_dim, use_vmap=use_vmap)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Output [*B, A, *G] for `inputs`, [*B, A, *F] each."""
        if len(inputs) != 1 and not self._takes_several:
            inputs = (torch.cat(inputs, -1),)
        first = inputs[0]
        agent_axis = first.ndim + self.agent_dim
        for x in inputs:
            self._require_input(x.shape, agent_axis)
        if agent_axis == 1:
            return self._forward_batch(inputs)
        batch = first.shape[:agent_axis]
        y = self._forward_batch([x.flatten(0, agent_axis - 1) if batch else x.unsqueeze(0) for x in inputs])
        return y.reshape(*batch, *y.shape[1:])

    def _forward_batch(self, xs: Sequence[Tensor]) -> Tensor:
        """Output [B, A, *G] for xs, [B, A, *F] each."""
        net = self._modules["net"]  # an attribute that is a module takes the time of a small layer to look up
        assert net is not None
        if self.share_params and not self.centralised:
            y = self._call_shared(net, *[x.flatten(0, 1) for x in xs])
            return y.reshape(xs[0].shape[0], self.n_agents, *y.shape[1:])
        if self.centralised:
            xs = [x.flatten(1, 2) for x in xs]
        if isinstance(net, StackedSequential):
            return cast(Tensor, net(xs[0], self.centralised))
        if self.share_params:
            y = self._call_shared(net, *xs).unsqueeze(1)
            return y.expand(-1, self.n_agents, *y.shape[2:])
        # torch.vmap leaves out backward hooks silently.
        if self.use_vmap and not has_backward_hooks(net):
            return call_each(net, xs, self.centralised, self.vmap_randomness)
        return call_one_by_one(net, xs, self.centralised, self.n_agents)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _rename_torchrls(state_dict, prefix, self.net)
        if self.lazy_inputs is not None and (size := self.lazy_inputs.size_in(state_dict, prefix)) is not None:
            self.lazy_inputs.complete(self, size)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _call_shared(self, net: nn.Module, *inputs: Tensor) -> Tensor:
        """Output [batch, *G] of the one network for its inputs, [batch, *F] each."""
        if type(net) is nn.Sequential and len(inputs) == 1 and not does_more(net):
            return run_layers(net, inputs[0], net)
        return cast(Tensor, net(*inputs))

    def agent(self, index: int) -> AgentView:
        """An `AgentView` of the agent `index`, callable on what that agent sees. Raises WrongIndex."""
        if not -self.n_agents <= index < self.n_agents:
            raise WrongIndex(f"agent {index} of {self.n_agents}: expected -{self.n_agents} to {self.n_agents - 1}")
        return AgentView(self, index % self.n_agents)

    def to_modules(self) -> list[nn.Module]:
        """A plain module for each agent, with copies of its values; of a shared network one copy, for all agents."""
        if isinstance(self.net, StackedSequential):
            return list(self.net.split())
        return [copy_module(self.net, {})] if self.share_params else split_any(self.net, self.n_agents)

    def load_modules(self, modules: Sequence[nn.Module]) -> None:
        """Copies the values of `modules`, as many as `to_modules` returns, in place. Raises as the constructor does."""
        expected = 1 if self.share_params else self.n_agents
        if len(modules) != expected:
            raise ConfigError(f"got {len(modules)} modules; expected {expected}, as many as to_modules returns")
        options = {name: getattr(self, name) for name in ("n_agents", "centralised", "share_params", "agent_dim")}
        other = MultiAgentNet(iter(modules).__next__, **options)
        if type(other.net) is not type(self.net):  # with other layouts of the weights
            raise SpecMismatch(
                f"the modules make a {type(other.net).__name__}, this network has a {type(self.net).__name__}: they "
                "differ in layers or hooks; make a new one with MultiAgentNet.from_modules"
            )
        self.load_state_dict(other.state_dict())

    def init_agents(self, init: Callable[[int, nn.Module], object]) -> None:
        """Calls ``init(agent, module)`` with a plain module for each agent, then copies the modules' values back.

        A shared network is initialised once, as agent 0. The parameters stay the same objects.
        """
        modules = self.to_modules()
        for agent, module in enumerate(modules):
            init(agent, module)
        self.load_modules(modules)

    def reset_parameters(self) -> None:
        """Draws new parameters for every agent, independently, as the layers' own ``reset_parameters`` do."""
        self.init_agents(_reset)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales each agent's gradients, independently of the others', to a norm of at most ``max_norm``.

        Returns the norms before, [A]; of a shared network one norm, that of the whole, [1].
        """
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        n_networks = 1 if self.share_params else self.n_agents
        if not grads:
            return torch.zeros(n_networks)
        rows = [grad.reshape(n_networks, -1) for grad in grads]
        norms = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows]).norm(dim=0)
        # The small term is that of torch.nn.utils.clip_grad_norm_: for one network the results are equal.
        scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale if self.share_params else scale.view(-1, *[1] * (grad.ndim - 1)))
        return cast(Tensor, norms)

    def _require_input(self, shape: torch.Size, agent_axis: int) -> None:
        if agent_axis < 0 or shape[agent_axis] != self.n_agents:
            expected = f"{self.n_agents} agents at axis {self.agent_dim}"
        elif self.n_agent_inputs is not None and shape[agent_axis + 1] != self.n_agent_inputs:
            expected = f"size {self.n_agent_inputs} for each agent at axis {self.agent_dim + 1}"
        else:
            return
        raise SpecMismatch(
            f"the network got an input of shape {list(shape)}; expected {expected}, after the batch axes"
        )

    def extra_repr(self) -> str:
        return f"n_agents={self.n_agents}, centralised={self.centralised}, share_params={self.share_params}"


class AgentView:
    """One agent's network inside a MultiAgentNet: no copy, its gradients reach the stacked parameters.

    of: the `MultiAgentNet` that has made this, by its method ``agent``.
    index: the agent, from 0 on.

    >>> import torch
    >>> from muster.nn import MultiAgentNet
    >>> net = MultiAgentNet(lambda: torch.nn.Linear(4, 2), n_agents=3)
    >>> first = net.agent(0)
    >>> first(torch.zeros(8, 4)).shape, first.parameters()["bias"].shape
    (torch.Size([8, 2]), torch.Size([2]))
    """

    def __init__(self, of: MultiAgentNet, index: int) -> None:
        self._of = of
        self.index = index

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Output [*B, *G] for `inputs`, [*B, *F] each; if centralised, all agents' joined along F's first axis."""
        if len(inputs) != 1 and not self._of._takes_several:
            inputs = (torch.cat(inputs, -1),)
        x = inputs[0]
        n_batch_axes = x.ndim + self._of.agent_dim + 1
        if n_batch_axes < 0:
            shape = list(x.shape)
            raise SpecMismatch(f"agent {self.index} got an input of shape {shape}; expected {-n_batch_axes} more axes")
        batch = x.shape[:n_batch_axes]
        y = self._call_batch([x.flatten(0, n_batch_axes - 1) if batch else x.unsqueeze(0) for x in inputs])
        return y.reshape(*batch, *y.shape[1:])

    def _call_batch(self, xs: Sequence[Tensor]) -> Tensor:
        net = self._of.net
        if isinstance(net, StackedSequential):
            return net.one(xs[0], self.index)
        return cast(Tensor, net(*xs)) if self._of.share_params else call_one(net, xs, self.index)

    def parameters(self) -> dict[str, Tensor]:
        """This agent's parameters by the names of the single network: views, to be changed in place without grad."""
        own: dict[str, Tensor] = dict(self._of.net.named_parameters())
        return own if self._of.share_params else {name: stacked[self.index] for name, stacked in own.items()}

    def __repr__(self) -> str:
        return f"AgentView({self.index} of {type(self._of).__name__})"


def _rename_torchrls(state: MutableMapping[str, Any], prefix: str, net: nn.Module) -> None:
    """Renames the keys of TorchRL's network behind ``prefix`` to those of ``net``, in place: ``net.0.weight``.

    Weights [A, out, in] of linear layers become [A, in, out] where ``net`` has them so.
    """
    place = next((place for place in _TORCHRLS_PLACES if any(key.startswith(prefix + place) for key in state)), None)
    if place is None:
        return
    for key in [key for key in state if key.startswith(tuple(prefix + one for one in _TORCHRLS_PLACES))]:
        tensor = state.pop(key)
        path, _, name = key.removeprefix(prefix + place).rpartition(".")
        if key.startswith(prefix + place) and not name.startswith("__"):  # the shape and device of TorchRL's TensorDict
            if name == "weight" and isinstance(dict(net.named_modules()).get(path), StackedLinear):
                tensor = tensor.transpose(-1, -2)
            state[f"{prefix}net.{path}.{name}"] = tensor


def _input_size(module: nn.Module, n_joined: int) -> int | None:
    """The size of one joined agent's input along the first axis; None where the first layer does not fix it."""
    first = module[0] if type(module) is nn.Sequential and len(module) else module
    if type(first) is nn.Linear:
        size = first.in_features
    elif type(first) is nn.Conv2d:
        size = first.in_channels
    else:
        return None
    if size % n_joined:
        raise SpecMismatch(f"the network takes {size} inputs, which {n_joined} agents cannot give: not a multiple")
    return size // n_joined


def _takes_several(module: nn.Module) -> bool:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return False
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _reset(agent: int, module: nn.Module) -> None:
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
