"""The parallelized model: the parts that this rank holds, and forward and backward passes over all ranks.

Rows may be split over ranks and micro-batches in any manner, also unevenly. Each loss is divided by the number of
targets in the global batch. Gradients are summed over ranks, never averaged, so the split does not change the result.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from train.config.settings import Settings
from train.data.rows import Rows, concatenate_rows
from train.model.draw import BY_POSITION
from train.model.flash_attention import activate_flash_attention
from train.model.fp8 import compute_scales, enable_fp8
from train.model.freeze import frozen_names
from train.model.loss import HeadLoss, LossTally
from train.model.own import OwnModel, build_any, first_value
from train.model.shape import LOGIT_TILE, ModelShape, OwnShape, parameter_sizes
from train.model.transformer import LayerSpan, Recompute, Transformer, enable_dropout
from train.optim.disk_tensor import DiskTensor
from train.optim.parameter import local_tensor, region_of
from train.parallel.compression import Compressor, compress_ddp, compress_fsdp, method_of
from train.parallel.data_parallel import NUMBER_FORMATS, ShardedStates, allocate, shard, sharded_modules
from train.parallel.experts import place_experts
from train.parallel.layout import data_ranks, layers_of, rows_of, stages_of
from train.parallel.memory import layers_to_recompute
from train.parallel.pipeline import Pipeline
from train.parallel.ranks import Ranks, build_mesh, use_fixed_order
from train.parallel.tensor_context import apply_context_parallel, apply_tensor_parallel, context_part


class SplitModel:
    """This rank's layers of a model that `[layout]` divides among ranks. The weights start uninitialized."""

    def __init__(
        self, shape: ModelShape, settings: Settings, ranks: Ranks, num_sources: int, batches: Sequence[tuple[int, int]]
    ):
        """`num_sources`: number of sources whose losses are summed separately.

        `batches`: (positions of a row, rows of a step) of each training stage.
        """
        # A training plan has no automatic settings left; a caller that builds only a model may leave them to the
        # device.
        device = ranks.device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        settings = settings.for_device(device.type, capability)
        self.shape, self.settings, self.ranks = shape, settings, ranks
        layout = settings.layout
        self._frozen = frozen_names(parameter_sizes(shape), settings.train.freeze)
        use_matrix_units(ranks.device)
        if ranks.device.type == "cuda":
            use_fixed_order(settings.train.deterministic)
        self.mesh = build_mesh(layout, ranks.world_size, ranks.device.type)
        self.num_stages = self.mesh.axes["pipeline"] * layout.stages
        self.stages = stages_of(layout, self.mesh.place("pipeline")) if self.num_stages > 1 else [0]
        here = [layers_of(shape.num_layers, self.num_stages, stage) for stage in self.stages]
        modes = self._recompute([layer for layers in here for layer in layers], max(batches))
        self._files: list[DiskTensor] = []
        self.parts = [self._part(layers, modes) for layers in here]
        self._num_sources = num_sources
        self._rows_by_length = dict(sorted(batches))  # the most rows of each length
        self._pipeline = Pipeline(self.parts, self.stages, self.mesh, layout) if self.num_stages > 1 else None
        self.parameters = self._named_parameters()
        """This rank's parameters by name in the whole model; a copy of a tied embedding has the embedding's name."""
        self._tie = self._tied_group()
        self.compressor: Compressor | None = None
        """Sums gradients between replicas; None if torch does that."""
        self._whole: DistributedDataParallel | None = None
        self._shares: ShardedStates | None = None
        self._join_replicas()

    def _join_replicas(self) -> None:
        """Set up the sum of gradients over the replicas."""
        layout, ranks, named = self.settings.layout, self.ranks, self._trained()
        method = method_of(layout, self.settings.train.seed)
        if layout.data in ("ddp", "zero1") and ranks.world_size > 1:
            self._whole = DistributedDataParallel(self.parts[0], init_sync=False, gradient_as_bucket_view=True)
            self.compressor = Compressor(method, self.mesh.group("replicate"), ranks.device)
            compress_ddp(self._whole, named.items(), self.compressor)  # without compression too: DDP would average
            if layout.data == "zero1":
                self._shares = ShardedStates(named.items(), self.mesh.along("replicate"))
        elif layout.compress != "none":
            self.compressor = Compressor(method, self.mesh.group("replicate"), ranks.device)
            compress_fsdp(self.parts, named.items(), self.compressor)

    def _recompute(self, layers: list[int], largest: tuple[int, int]) -> dict[int, Recompute]:
        """Return the recomputation mode (none, selective, full) of each layer on this rank, by layer number."""
        mode = self.settings.layout.activation_checkpointing
        if mode != "budget":
            return dict.fromkeys(layers, mode)
        world_size, device = self.ranks.world_size, self.ranks.device.type
        number = layers_to_recompute(self.shape, self.settings, world_size, *largest, device)
        return {layer: "full" if index < number else "none" for index, layer in enumerate(layers)}

    def _part(self, layers: range, modes: Mapping[int, Recompute]) -> Transformer:
        layout, train = self.settings.layout, self.settings.train
        span = LayerSpan(layers.start, layers.stop, self.shape.num_layers)
        model = build_any(self.shape, span, train.objective != "mlm", modes.__getitem__)
        kind = self.ranks.device.type
        model.loss = HeadLoss(
            self.settings.optim.z_loss,
            layout.chunk_on(kind),
            fused=bool(layout.compile),
            multiple=LOGIT_TILE if kind == "cuda" else 1,
            softcap=self.shape.logit_softcap,
        )
        if train.drops:
            enable_dropout(model, train, self._part_of_heads(), layout.context * layout.tensor)
        if layout.context > 1:
            apply_context_parallel(model, self.mesh.group("context"), layout.context_by)
        if layout.tensor > 1:
            apply_tensor_parallel(model, self.mesh.along("tensor"))
        if train.precision == "fp8":
            enable_fp8(model, train.fp8_scaling, emulated=kind == "cpu")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self._whole_name(name) not in self._frozen)
        if layout.compile:
            model.compile_layers()
        if self._sharded:
            placed = place_experts(model, self.mesh) if layout.expert_parallel else set()
            shard(model, self.mesh, layout, train.precision, placed)
        self._files += allocate(model, layout, self.ranks.device)
        return model

    def _part_of_heads(self) -> int:
        """Return the index of this rank's heads among the ranks that share the heads of a layer."""
        by_heads = self.settings.layout.context_by == "heads"
        part = self.mesh.place("tensor")
        return part * self.mesh.axes["context"] + self.mesh.place("context") if by_heads else part

    @property
    def _sharded(self) -> bool:
        """True if `fully_shard` is applied to the model."""
        # On a single rank, FSDP2 only casts weights to a 16-bit dtype or offloads them.
        layout = self.settings.layout
        alone = self.ranks.world_size == 1 and self.settings.train.precision == "fp32"
        alone = alone and not layout.offloads_parameters
        return layout.data in ("zero2", "zero3") and not alone

    # --------------------------------------------------------------------------------------------------- parameters

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        # Collected once, while the parameters are sharded: within a step FSDP2 exposes gathered ones by the same names.
        return {self._whole_name(name): parameter for part in self.parts for name, parameter in part.named_parameters()}

    def _whole_name(self, name: str) -> str:
        """Return the name in the whole model of a parameter of a part."""
        # A model of the user has a head of its own, or none, whatever the shape proposes.
        tied = self.shape.tie_embeddings and not isinstance(self.shape, OwnShape)
        return "embedding.weight" if tied and name == "head.weight" else name

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.parameters.items() if name not in self._frozen}

    def parameters_to_update(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that the optimizer updates, by name; with ZeRO-1, this rank's rows of them."""
        if self._shares is not None:
            return self._shares.shards
        return self._trained() if self._frozen else self.parameters

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Return the context in which the optimizer updates weights. When it exits, all ranks have the new weights."""
        if self._shares is not None:
            self._shares.view_gradients()
        yield
        if self._shares is not None:
            self._shares.gather()
        self.release()
        if self.settings.train.fp8_scaling == "gather":
            for part in self.parts:
                compute_scales(part)

    def release(self) -> None:
        """Remove the pages of weights on a disk from the memory of this process."""
        for file in self._files:
            file.release()

    @property
    def bytes_of_shares(self) -> int:
        """Return the bytes that this rank sends after an update with ZeRO-1, which all-gathers the weights."""
        return 0 if self._shares is None else self._shares.bytes_gathered

    @property
    def copies(self) -> dict[str, int]:
        """Return the number of copies of each parameter that more than one pipeline stage has, by name."""
        return {"embedding.weight": 2} if self.shape.tie_embeddings and self.num_stages > 1 else {}

    def set_initial_weights(self, seed: int, rule: int = BY_POSITION) -> None:
        """Set every parameter to its initial value; each rank draws its own shard, if `rule` is BY_POSITION."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                region = region_of(name, parameter)
                local_tensor(parameter).copy_(first_value(self.parts[0], name, parameter.shape, seed, region, rule))

    # --------------------------------------------------------------------------------------------------------- rows

    def rows_here(self, num_rows: int) -> range:
        """Return the rows of a global batch of `num_rows` rows that this rank reads."""
        return rows_of(num_rows, data_ranks(self.mesh.axes), self.mesh.data_rank)

    def micro_batches(self, rows: Rows, num_rows: int) -> list[Rows]:
        """Split `rows`, this rank's rows of a batch of `num_rows` rows, into micro-batches on its device.

        All ranks get the same number of micro-batches. Missing rows are replaced by rows without targets.
        """
        # Each micro-batch runs collectives, so every rank needs the same number of them.
        number, size = self._split(num_rows, rows.inputs_BT.shape[1])
        # A pipeline needs micro-batches of equal size; otherwise the last may be smaller.
        equal = bool(self.settings.layout.compile) or self._pipeline is not None
        if self.mesh.axes["context"] > 1:
            rows = context_part(rows, self.mesh.axes["context"], self.mesh.place("context"))
        rows = rows.padded(size * number if equal else size * (number - 1) + 1)
        return [rows.part(first, first + size).to(self.ranks.device) for first in range(0, size * number, size)]

    def _split(self, num_rows: int, length: int) -> tuple[int, int]:
        """Return the number of micro-batches of `num_rows` rows of `length` positions, and the rows of each.

        The number in a training step is that of `num_micro_batches`.
        """
        groups, size = data_ranks(self.mesh.axes), self.settings.layout.rows_at_once
        most = -(-num_rows // groups)
        # Compiled layers always get the same number of rows of a length, in training and evaluation: another number
        # would recompile them.
        whole = self._rows_by_length.get(length, groups * size) if self.settings.layout.compile else num_rows
        size = min(size, -(-whole // groups))
        return -(-most // size), size

    def rows_of_step(self, num_rows: int, length: int) -> int:
        """Return the number of rows of `length` positions, with padding, that this rank computes in a step.

        `num_rows`: rows of the step.
        """
        number, size = self._split(num_rows, length)
        if self.settings.layout.compile or self._pipeline:
            return size * number
        return max(len(self.rows_here(num_rows)), size * (number - 1) + 1)

    def part_of(self, rows: Rows) -> list[Rows]:
        """Return this rank's rows as micro-batches. `rows`: all rows, the same on every rank."""
        here = self.rows_here(len(rows))
        # A rank without any row gets a row without targets, which adds nothing to the loss.
        mine = rows.part(here.start, here.stop) if here else rows.part(0, 1).without_targets()
        return self.micro_batches(mine, len(rows))

    # --------------------------------------------------------------------------------------------------------- step

    def backward(self, rows: list[Rows], scale: float, counts_right: bool = False) -> LossTally:
        """Compute the gradient of the sum of losses times `scale`, over all ranks.

        Returns the sum of losses of each source over all ranks. `counts_right`: with the number of targets that have
        the largest logit.
        """
        tally = LossTally.empty(self._num_sources, self.ranks.device, counts_right)
        self._prepare_loss(scale, tally)
        if self._pipeline is not None:
            self._pipeline.run(concatenate_rows(rows), len(rows), self._stream)
            self._add_tied_gradients()
        else:
            self._backward_micro_batches(rows)
        return self._over_all_ranks(tally)

    def _backward_micro_batches(self, rows: list[Rows]) -> None:
        for number, part in enumerate(rows, start=1):
            self.parts[0].loss.num_targets = part.counted
            with self._sync_gradients(last=number == len(rows)), self._number_format():
                total = (self._whole or self.parts[0])(
                    part.inputs_BT, part.documents_BT, part.targets_BT, part.sources_B, part.starts_N, **part.draws
                )
            with self._sync_gradients(last=number == len(rows)):
                total.backward()

    @torch.no_grad()
    def measure(self, rows: list[Rows], num_sources: int, counts_right: bool = False) -> LossTally:
        """Return the sum of losses of each source over all ranks, without computing gradients.

        `counts_right`: with the number of targets that have the largest logit.
        """
        tally = LossTally.empty(num_sources, self.ranks.device, counts_right)
        self._prepare_loss(1.0, tally)
        if self._pipeline is not None:
            self._pipeline.measure(rows, self._stream)
        else:
            for part in rows:
                self.parts[0].loss.num_targets = part.counted
                with self._number_format():
                    self.parts[0](part.inputs_BT, part.documents_BT, part.targets_BT, part.sources_B, part.starts_N)
        # Without a backward pass, weights kept after the forward pass stay gathered and hide their shards from a save.
        for part_of_model in self.parts:
            for module in sharded_modules(part_of_model):
                module.reshard()
        return self._over_all_ranks(tally)

    def _over_all_ranks(self, tally: LossTally) -> LossTally:
        sums = torch.stack((tally.losses_S, tally.counts_S))
        if self.mesh.axes["tensor"] > 1 and self.mesh.place("tensor"):
            sums.zero_()  # every rank of the tensor axis has counted the same rows
        dist.all_reduce(sums)
        if (right_S := tally.right_S) is not None:
            # Not in the sum above: the order in which a ring adds numbers depends on the size of their tensor.
            if self.mesh.axes["tensor"] > 1 and self.mesh.place("tensor"):
                right_S.zero_()
            dist.all_reduce(right_S)
        return LossTally(sums[0], sums[1], right_S, self._figures_over_all_ranks())

    def _figures_over_all_ranks(self) -> torch.Tensor | None:
        """Return the sums of the figures of a model of the user over all ranks; None if it has none."""
        model = self.parts[0]
        if not isinstance(model, OwnModel) or model.figure_sums is None:
            return None
        sums, model.figure_sums = model.figure_sums, None
        dist.all_reduce(sums)
        return sums

    def figures_of(self, sums: list[float]) -> dict[str, float]:
        """Return the figures of a model of the user by name; empty for a transformer."""
        model = self.parts[0]
        return model.figures_of(sums) if isinstance(model, OwnModel) and sums else {}

    def _prepare_loss(self, scale: float, tally: LossTally) -> None:
        for part in self.parts:
            part.loss.scale, part.loss.tally = scale, tally
            if isinstance(part, OwnModel) and part.num_figures:
                part.figure_sums = torch.zeros(part.num_figures, dtype=torch.float64, device=self.ranks.device)

    def _sync_gradients(self, last: bool) -> AbstractContextManager[object]:
        """Return the context for the backward pass of a micro-batch; `last`: True for the last one of a step."""
        if self._whole is not None and not last:
            return self._whole.no_sync()  # DDP sums gradients for the last micro-batch only
        # FSDP2 reduce-scatters gradients for every micro-batch. Compression applies to the gradient of a step, which
        # must be complete before it is sent to the replicas. On a single rank there is nothing to scatter, but the same
        # copies would be made: a twentieth of the time of 1 B parameters on an H200 with 8 micro-batches.
        alone = self.ranks.world_size == 1 and not self.settings.layout.offloads_parameters
        every = self.compressor is None and not alone
        for module in sharded_modules(self.parts[0]):
            module.set_requires_gradient_sync(last or every)
            module.set_requires_all_reduce(last)
        return nullcontext()

    def _number_format(self) -> AbstractContextManager[object]:
        """Return the context for a forward pass: autocast to a 16-bit dtype, unless FSDP2 casts the weights."""
        number = NUMBER_FORMATS[self.settings.train.precision]
        if number is None or self._sharded:
            return nullcontext()
        return torch.autocast(self.ranks.device.type, number)

    @property
    def _stream(self) -> torch.dtype:
        return NUMBER_FORMATS[self.settings.train.precision] or torch.float32

    # --------------------------------------------------------------------------------------------- tied embeddings

    def _tied_group(self) -> dist.ProcessGroup | None:
        """Return the group of the two ranks of this pipeline that have a copy of a tied embedding.

        None if the embedding is not tied between stages, or if this rank is not in the group.
        """
        if not self.copies:
            return None
        line = self.mesh.along("pipeline").mesh.tolist()
        lines: list[list[int]] = [[] for _ in range(self.ranks.world_size)]
        dist.all_gather_object(lines, line, group=self.ranks.control)
        pairs = sorted({(members[0], members[-1]) for members in lines})
        groups = {pair: dist.new_group(list(pair)) for pair in pairs}  # every rank must create every group
        return groups[line[0], line[-1]] if self.ranks.rank in (line[0], line[-1]) else None

    def _add_tied_gradients(self) -> None:
        if self._tie is not None:
            gradient = self.parameters["embedding.weight"].grad
            if gradient is not None:
                dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self._tie)


def use_matrix_units(device: torch.device) -> None:
    """Enable TF32 for float32 products on a CUDA device, and the newest FlashAttention installed."""
    # TF32 rounds factors to 10 bits of mantissa and sums in float32. That is enough for the products that stay in
    # float32 beside a 16-bit dtype. By the data sheets of A100 and H100, they take a tenth of the time.
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        activate_flash_attention(device)
