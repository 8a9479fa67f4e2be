"""Parts of the engines for vLLM and verl: the weights of a model of vLLM, and the backend of the connection.

Follows vllm/model_executor/model_loader/reload of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...layouts import argument_values
from ...layouts.errors import argument_error
from ...loaders import recorded_destination
from ...loaders.recording import Load, Weights
from ...rules import cast
from ...rules.kinds import Rule
from ...runtime.connecting import Connection
from ...transfers.setup import read_or_report
from ...transfers.transfer import Transfer, transfer

# Classes of `quant_method` and of attention that leave weights on CUDA as the loader writes them.
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
PLAIN_ATTENTION = ("Attention",)

Found = dict[str, tuple[torch.Tensor, Any]]  # (tensor, layout) of each weight
# Finds destinations: gets the model's loader, its parameters, and a function to call with the result.
Record = Callable[[Load, Iterable[tuple[str, torch.Tensor]], Callable[[Found], None]], Found]


class LoadedWeights:
    """The weights of a model of vLLM as its loader writes them, before layers convert them for their kernels.

    If no layer converts weights, these are the model's parameters. Otherwise they are a second set of tensors, which
    stays allocated, and `finish` converts them as vLLM does when it reloads a checkpoint: layers may quantize, pack or
    transpose weights, or derive others from them.

    Args:
        vllm_config: vLLM's configuration of the model.
        plain_methods: class names of ``quant_method`` that do not convert weights, in addition to `PLAIN_METHODS`.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, plain_methods: Iterable[str]) -> None:
        self._model, self._model_config = model, vllm_config.model_config
        self._load = model.load_weights
        if vllm_config.parallel_config.enable_eplb:
            allowed = "False, because load balancing moves experts to other slots"
            self._load = _failing(argument_error("vLLM's enable_eplb", allowed, True))
        self._converts = _converts(model, {*PLAIN_METHODS, *plain_methods})
        self._layers: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}  # the second set: by layer and name

    def destinations(self, record: Record) -> Found:
        """Returns what `record` finds. The model's parameters are unchanged afterwards.

        `record` raises ValueError on all ranks if this rank has no memory for the second set, vLLM may move experts, or
        the loader writes to an attention layer that converts its weights, such as scales.
        """
        model = self._model
        if not self._converts:
            return record(self._load, model.named_parameters(), lambda _: None)
        from vllm.model_executor.model_loader.reload import layerwise

        with contextlib.ExitStack() as reload:
            reload.callback(self._end_reload)
            load, parameters = self._load, iter(model.named_parameters())
            as_loaded, kernel_tensors = {}, {}
            try:
                layerwise.initialize_layerwise_reload(model)
                kernel_tensors = {
                    layer: layerwise.get_layerwise_info(layer).kernel_tensors for layer in model.modules()
                }
                as_loaded = {layer: _tensors_as_loaded(layer) for layer in model.modules()}
                parameters = _untied(model, kernel_tensors)
            except Exception as error:
                load = _failing(error)

            def keep(found: Found) -> None:
                reload.close()
                self._keep_written(found, as_loaded, kernel_tensors)

            return record(load, parameters, keep)

    def _keep_written(
        self, found: Found, as_loaded: dict[torch.nn.Module, dict[str, torch.Tensor]], kernel_tensors: dict[Any, Any]
    ) -> None:
        """Keeps the tensors of the layers to which the loader writes, and of layers with tied weights."""
        from vllm.model_executor.model_loader.reload import layerwise

        written = {tensor.untyped_storage()._cdata for tensor, _ in found.values()}
        used: dict[int, torch.Tensor] = {}  # the second set, by the tensor that the kernels use
        for layer, tensors in as_loaded.items():
            if any(tensor.untyped_storage()._cdata in written for tensor in tensors.values()):
                if layerwise.is_deferred_attention_layer(layer):
                    raise argument_error("load", "a loader that writes no weights of attention layers", type(layer))
                self._layers[layer] = tensors
                used |= {id(x): tensors[name] for name, x in kernel_tensors[layer][0].items() if name in tensors}
        for layer in as_loaded.keys() - self._layers.keys():  # tied weights are converted for each of their layers
            tied = {name: used[id(x)] for name, x in kernel_tensors[layer][0].items() if id(x) in used}
            if tied:
                self._layers[layer] = tied

    @torch.no_grad()
    def finish(self) -> None:
        """Converts the weights, if layers do, and copies them to the tensors that the kernels use."""
        if not self._converts:
            for layer in self._model.modules():
                if type(layer).__name__ in PLAIN_ATTENTION and getattr(layer.impl, "sinks", None) is not None:
                    layer.process_weights_after_loading(self._model_config.dtype)  # its kernel may keep a copy of them
            return
        from vllm.model_executor.model_loader.reload import layerwise

        layerwise.initialize_layerwise_reload(self._model)
        try:
            for layer, weights in self._layers.items():
                info = layerwise.get_layerwise_info(layer)
                layerwise.materialize_layer(layer, info)
                tensors = layerwise.get_layer_tensors(layer)
                for name, weight in weights.items():
                    tensors[name].copy_(weight)
                layerwise._layerwise_process(layer, info)
        finally:
            self._end_reload()

    def _end_reload(self) -> None:
        """Restores layers that were not reloaded, and lets attention layers derive weights from others again."""
        from vllm.model_executor.model_loader.reload import layerwise

        for layer in self._model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                info.load_numel_total = 0  # so that vLLM does not warn about missing weights
        layerwise.finalize_layerwise_reload(self._model, self._model_config)


def unquantized(load: Load, vllm_config: Any) -> Load:
    """Returns `load`, or a loader that raises ValueError if vLLM quantizes the model."""
    if vllm_config.quant_config is None:
        return load

    quantization = type(vllm_config.quant_config).__name__
    return _failing(argument_error("vLLM's quant_config", "None: use another engine", quantization))


def _failing(error: Exception) -> Load:
    """Returns a loader that raises an error, so that recording it raises the error on all ranks."""

    def fail(_: Any) -> None:
        raise error

    return fail


def _quant_methods(model: torch.nn.Module) -> dict[str, str]:
    """Returns the class names of the layers' ``quant_method``, by the layers' names."""
    methods = {name: getattr(layer, "quant_method", None) for name, layer in model.named_modules()}
    return {name: type(method).__name__ for name, method in methods.items() if method is not None}


def _converts(model: torch.nn.Module, plain_methods: set[str]) -> bool:
    """Returns True if any layer may convert weights after loading."""
    methods = {*_quant_methods(model).values()}
    derive = {type(layer).__name__ for layer in model.modules() if hasattr(layer, "process_weights_after_loading")}
    if not methods <= plain_methods or not derive <= {*PLAIN_ATTENTION}:
        return True
    if not methods:
        return False
    from vllm.platforms import current_platform

    return not current_platform.is_cuda_alike()  # elsewhere linear layers pack weights


def _tensors_as_loaded(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Allocates the tensors of a layer as its loader expects them, with zeros, and returns them by name."""
    from vllm.model_executor.model_loader.reload import layerwise

    on_meta = [name for name, tensor in layerwise.get_layer_tensors(layer).items() if tensor.is_meta]
    layerwise.materialize_layer(layer, layerwise.get_layerwise_info(layer))
    tensors = layerwise.get_layer_tensors(layer)
    for tensor in tensors.values():
        tensor.weight_loader = layerwise._get_original_loader(tensor)
    for name in on_meta:
        tensors[name].zero_()
    return {name: tensors[name] for name in on_meta}


def _untied(model: torch.nn.Module, kernel_tensors: dict[torch.nn.Module, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the model's parameters, during a reload. Of tied weights, which vLLM unties, it yields the first."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        used = id(kernel_tensors[model.get_submodule(path)][0].get(attribute, parameter))
        if used not in seen:
            yield name, parameter
        seen.add(used)


def recorded(
    load: Load,
    parameters: Iterable[tuple[str, torch.Tensor]],
    weights: Weights,
    options: Any,
    link: Connection,
    use: Callable[[Found], None] = lambda _: None,
) -> Found:
    """Returns what this rank's loader writes. All ranks of the connection call; those of the trainer load nothing.

    Raises ValueError on all ranks if a loader cannot be recorded, or `use` fails on a rank.

    Args:
        options: has `unused` and `unwritten`, as in `recorded_destination`.
        use: a function to call with the result.
    """
    lists = {"unused": options.unused, "unwritten": options.unwritten}
    group = link.group
    found = recorded_destination(load, weights, range(link.world_size), parameters=parameters, group=group, **lists)
    problems: list[str] = []
    read_or_report(lambda: use(found), problems, dist.get_rank(group))
    of_ranks: list[list[str]] = [[]] * link.world_size
    dist.all_gather_object(of_ranks, problems, group=group)
    if texts := [text for of_rank in of_ranks for text in of_rank]:
        raise ValueError("the weights as loaded cannot be kept, because\n  " + "\n  ".join(dict.fromkeys(texts)))
    return found


def planned(
    source: Any, to: Any, rules: Sequence[Rule], options: Any, link: Connection, device: torch.device | None
) -> Transfer:
    """Returns the transfer of one side of the connection. The weights are cast after `rules`. All ranks must call.

    Args:
        options: has `dtype`, of vLLM's parameters or None, `only_changed` and `unused`, as in `transfer`.
    """
    casts = [] if options.dtype is None else _casts({} if to is None else to, options.dtype, link)
    given = {"only_changed": options.only_changed, "unused": options.unused, "group": link.group, "device": device}
    return transfer(source, to, [*rules, *casts], **given)


def _casts(to: Mapping[str, tuple[torch.Tensor, Any]], dtype: str, link: Connection) -> list[Rule]:
    """Returns rules that cast weights whose parameters have `dtype` or float32 to that dtype, on all ranks."""
    of_ranks: list[dict[str, str]] = [{}] * link.world_size
    dist.all_gather_object(of_ranks, {name: layout.dtype for name, (_, layout) in to.items()}, group=link.group)
    dtypes = {name: kept for of_rank in of_ranks for name, kept in of_rank.items()}
    allowed = (argument_values.dtype_text(dtype), "float32")
    by_dtype = {kept: sorted(name for name in dtypes if dtypes[name] == kept) for kept in allowed}
    return [cast(kept, names) for kept, names in by_dtype.items() if names]


def default_backend() -> str:
    """Returns torch's default backend for the accelerator, or for CPU tensors if there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return dist.get_default_backend_for_device(accelerator or "cpu")
