"""What a training framework does beyond the algorithm, in memory and in time: one convention per field.

References
----------
Megatron-Core 0.12 (``core/tensor_parallel/layers.py``, ``core/transformer/moe``) with Transformer Engine 2.11
(``module/base.py``, ``pytorch/cross_entropy.py``). Every figure was checked against the peak memory of
19 measured configurations published by MooreThreads/SimuMax (``docs/b200``).
PyTorch 2 (``torch/distributed/pipelining/stage.py``, ``torch/distributed/tensor/parallel/loss.py``), checked
against its own ``MemTracker``.
"""

from dataclasses import dataclass, replace

from meshwise.simulator.brief import brief_repr

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Framework:
    """Conventions of one framework; without a value a flag is off and a size 0.

    Parameters
    ----------
    logits_in_precision
        Whether logits stay in the dtype of the product that makes them; otherwise they are kept in fp32.
    loss_copies
        Extra copies of the logits that the loss makes in each pass, beside the logits that it keeps and their
        gradient: with the whole vocabulary, and with a cut vocabulary. ``None`` where the gradient overwrites the
        logits.
    casts_logits
        Whether logits in the dtype of the product lie beside those in fp32 during the loss, and so do their gradients.
    keeps_gathered
        Whether a product keeps its input gathered along the tensor axis; otherwise it keeps its shard and gathers
        it again in backward.
    fused_gradients
        Whether products add weight gradients straight to the accumulated gradients.
    whole_table
        Whether backward of an embedding with cut rows makes the gradient of all rows.
    dummy_gradients
        Whether a product returns a weight gradient that nothing reads: one per shape, never freed.
    gather_buffer
        Whether the gathered input of the last product has its own buffer, which is never freed.
    workspace, grouped_workspace, other_workspace
        Bytes that stay allocated as scratch memory of products: on every rank, for products of experts, and for
        products outside the framework's own layers (the last product and a router's).
    routed_copies
        Copies of the experts' results that exist while the results are combined.
    keeps_results
        Whether combining keeps the experts' results; otherwise the weights are applied in the experts' activation.
    keeps_gates
        Whether a gated activation keeps the activated gate beside its inputs, because one operator makes the gate and
        another multiplies by it. Otherwise one kernel does both and makes the gate again in backward.
    routing_bytes
        Bytes kept for every pair of a token and an expert, beside the probability in fp32.
    buffers_every_microbatch
        Whether a stage has receive buffers for every microbatch of a step and keeps what it sends until backward;
        otherwise it has the buffers of the current microbatch.
    late_biases
        Whether the bias of a product whose sum is scattered along the sequence is added to the scattered part, so
        that each tensor rank has the bias gradient of its own tokens; otherwise it is added to the sum.
    flattens_gradients
        Whether gradients are copied into one piece before they are summed: the gradients of a bucket with ZeRO 2 and
        3, and all gradients that are summed after the last backward.
    drops_gradients
        Whether the memory of gradients is freed once the optimizer has read them
        (`meshwise.strategies.lowering.costs.optimizer`).
    keeps_graph
        Whether a split backward keeps everything that forward kept, except what the loss kept, until the weight
        gradients are made; a first stage, whose input has no gradient, then does all of backward at that time.
    adds_gradients
        Whether separate kernels add the gradients of a microbatch to the gradients of the earlier microbatches
        (`meshwise.strategies.lowering.costs.rewrites`).
    hides_input_gradients
        Whether tensor ranks sum the input gradient of a column-parallel product while the product for its weight
        gradient runs (`meshwise.strategies.lowering.costs.rewrites`).
    waits_for_exchanges
        Whether the host of a pipeline stage launches nothing of a pass before its input has been received and
        everything before it has ended.
    recomputes_unread
        Whether a recomputed layer runs to its end even where backward does not read the result: the last product and
        what follows it.
    keeps_remainders
        Whether the optimizer keeps only the half of the fp32 main weights that the bf16 weights lack.
    keeps_shards
        Whether a rank that shares states with ZeRO 2 or 3 keeps parameter shards in the precision of the states: with
        ZeRO 2 beside the whole parameters; with 16-bit parameters the shards are the main weights, and no other shard
        is kept.
    keeps_quantised
        Whether fp8 copies of weights are kept through a step; otherwise each product casts its own.
    quantised_parameters
        Whether weights that layers multiply by in fp8 are kept and gathered in fp8 alone.
    waits_for_passes
        Whether hosts also wait for passes where there is no pipeline.
    waits_for_collectives
        Whether a host launches nothing before a collective inside a pass has ended.
    steps_together
        Whether the optimizer's step makes a temporary tensor for every parameter at once, in the precision of the
        states: the roots of AdamW's second moments.
    widens_gradients
        Whether the optimizer's step copies 16-bit gradients to fp32.
    shares_weights
        Whether data ranks gather and reduce each weight by itself, where it is read and where its gradient is made,
        instead of all weights of a block together.
    composed
        Kinds of operators that are composed of torch's operators. RMS norms then keep ``x.float()`` and
        ``(x * rsqrt).to(bf16)`` for backward instead of the input.
    """

    name: str
    loss_copies: tuple[int, int] | None
    routed_copies: int
    logits_in_precision: bool = False
    casts_logits: bool = False
    keeps_gathered: bool = False
    fused_gradients: bool = False
    whole_table: bool = False
    dummy_gradients: bool = False
    gather_buffer: bool = False
    workspace: int = 0
    grouped_workspace: int = 0
    other_workspace: int = 0
    keeps_results: bool = False
    keeps_gates: bool = False
    routing_bytes: int = 0
    buffers_every_microbatch: bool = False
    late_biases: bool = False
    flattens_gradients: bool = False
    drops_gradients: bool = False
    keeps_graph: bool = False
    adds_gradients: bool = False
    hides_input_gradients: bool = False
    waits_for_exchanges: bool = False
    recomputes_unread: bool = False
    keeps_remainders: bool = False
    keeps_shards: bool = False
    keeps_quantised: bool = False
    quantised_parameters: bool = False
    waits_for_passes: bool = False
    waits_for_collectives: bool = False
    composed: tuple[str, ...] = ()
    shares_weights: bool = False
    steps_together: bool = False
    widens_gradients: bool = False

    __repr__ = brief_repr()


MEGATRON = Framework(
    name="megatron",
    logits_in_precision=True,  # --cross-entropy-loss-fusion with --cross-entropy-fusion-impl te
    loss_copies=None,  # TE pytorch/cross_entropy.py writes the gradient over the logits
    keeps_gathered=False,  # layers.py, LinearWithGradAccumulationAndAsyncCommunication
    fused_gradients=True,  # --gradient-accumulation-fusion, the default
    dummy_gradients=True,  # TE module/base.py, get_dummy_wgrad
    gather_buffer=True,  # layers.py, get_global_memory_buffer().get_tensor(..., "mpu")
    workspace=32 * MIB,  # TE module/base.py, get_cublas_workspace_size_bytes
    grouped_workspace=4 * 32 * MIB,  # TE module/base.py, get_multi_stream_cublas_workspace
    keeps_quantised=True,  # TE module/base.py, get_weight_workspace: is_first_microbatch
    other_workspace=2 * 8320 * 1024,  # torch CUDABlas, :4096:2:16:8, one a thread: forward and autograd
    routed_copies=4,  # token_dispatcher.py: the experts' results, sorted, exchanged, and in the tokens' order
    keeps_results=False,  # experts.py, weighted_bias_swiglu_impl
    keeps_gates=False,  # core/fusions/fused_bias_swiglu.py
    routing_bytes=18,  # moe_utils.py: 10 of scores, maps and the auxiliary loss, 8 of row_id_map
    late_biases=True,  # layers.py, RowParallelLinear: skip_bias_add, and bias.sequence_parallel
    drops_gradients=False,  # param_and_grad_buffer.py
    hides_input_gradients=True,  # layers.py, LinearWithGradAccumulationAndAsyncCommunication
    waits_for_exchanges=True,  # p2p_communication.py: batch_p2p_sync, torch.cuda.synchronize()
    recomputes_unread=True,  # tensor_parallel/random.py, CheckpointFunction.backward runs all of forward
)

MEGATRON_PLAIN_LOSS = replace(
    MEGATRON,
    name="megatron_plain_loss",
    # core/tensor_parallel/cross_entropy.py, VocabParallelCrossEntropy: logits.float(), then exponentials and the
    # gradient in place of them; without --cross-entropy-loss-fusion, the default
    logits_in_precision=False,
    casts_logits=True,
)

MEGATRON_PLAIN = replace(
    MEGATRON_PLAIN_LOSS,
    name="megatron_plain",
    fused_gradients=False,  # --no-gradient-accumulation-fusion
    adds_gradients=True,  # core/distributed/distributed_data_parallel.py, _make_backward_post_hook: main_grad.add_
    dummy_gradients=False,  # TE module/linear.py: only with fuse_wgrad_accumulation
)

MEGATRON_DEEPSPEED = replace(
    MEGATRON,
    name="megatron_deepspeed",
    fused_gradients=False,  # deepspeed's fp16 optimizers have no main_grad that products could add to
    adds_gradients=True,  # torch/csrc/autograd/functions/accumulate_grad.h
    hides_input_gradients=False,  # megatron/mpu/layers.py of its fork of 2022 waits for the sum
    waits_for_passes=True,  # megatron/timers.py of 2022, _Timer.start and stop: torch.cuda.synchronize()
    waits_for_collectives=True,
    widens_gradients=True,  # deepspeed/runtime/zero/stage_1_and_2.py, step: single_grad_partition is cast
)

NEMO = replace(
    MEGATRON,
    name="nemo",
    keeps_remainders=True,  # apex DistributedFusedAdam and Megatron-Core's OptimizerConfig, store_param_remainders
    quantised_parameters=True,  # NeMo's user guide, "Communication overlap": fp8_param_gather
)

MEGATRON_2021 = replace(
    MEGATRON,
    name="megatron_2021",
    fused_gradients=False,
    adds_gradients=True,  # model/distributed.py, _make_param_hook: main_grad.add_
    hides_input_gradients=False,  # mpu/layers.py, copy_to_tensor_model_parallel_region: waits for the sum
)
"""Megatron-LM of 2021, before products accumulated weight gradients and summed input gradients asynchronously."""

TORCH = Framework(
    name="torch",
    loss_copies=(1, 2),  # log-probabilities; loss.py keeps the probabilities too
    keeps_gathered=True,
    whole_table=True,  # the embedding of a cut table is masked, and its backward makes every row
    routed_copies=1,
    keeps_results=True,
    keeps_gates=True,  # torch/nn/functional.py: silu keeps its input, and a product both of its own
    buffers_every_microbatch=True,  # stage.py, _prepare_forward_infra and _prepare_backward_infra
    late_biases=False,  # of sequence-parallel modules DTensor has only the norms' gradients in parts
    flattens_gradients=True,  # fully_shard's foreach_reduce; the executor's reducer, where no buckets of torch reduce
    drops_gradients=True,  # torch/optim/optimizer.py, zero_grad: set_to_none
    keeps_graph=True,  # torch/distributed/pipelining/_backward.py, stage_backward_input: retain_graph
    adds_gradients=False,  # one microbatch adds to nothing, and with ZeRO 2 and 3 shards are added
    hides_input_gradients=False,  # torch/distributed/tensor: its matrix product waits for the sum
    waits_for_exchanges=False,  # stage.py: work.wait() lets the stream wait, not the host
    recomputes_unread=False,  # torch/utils/checkpoint.py, _StopRecomputationError: all that was kept is there
    keeps_quantised=False,  # torchao float8/float8_linear.py casts the weight in every forward
    steps_together=True,  # torch/optim/adam.py, _multi_tensor_adam: torch._foreach_sqrt; the default on CUDA
    keeps_shards=True,  # fully_shard: _fsdp_param.py keeps the sharded parameter beside the gathered one
)

UNKNOWN = replace(
    TORCH,
    name="unknown",
    loss_copies=(2, 2),  # the model's output in fp32 is there until backward ends, for whoever called the model has it
    buffers_every_microbatch=False,  # torch.distributed.pipelining's own: others reuse those of the microbatch at hand
    flattens_gradients=False,  # fully_shard's own; buckets of others are views of a buffer that is there
    adds_gradients=True,  # torch/csrc/autograd/functions/accumulate_grad.h, without fused accumulation
    widens_gradients=True,  # as deepspeed's do; only optimizers of Megatron-LM and NeMo sum in fp32 from the start
)
"""A framework on torch that does not use torch's own parallel APIs: only what autograd does."""

TORCHTITAN = replace(TORCH, name="torchtitan")
"""torchtitan 0.3: all of torch's conventions hold, since its distributed/fsdp.py calls fully_shard, its
pipeline_parallel.py calls torch.distributed.pipelining, and DTensor cuts its products."""

TORCH_FUSED_LOSS = replace(
    TORCH,
    name="torch_fused_loss",
    recomputes_unread=True,  # composer/distributed/dist_strategy.py checkpoints re-entrantly unless told otherwise
    logits_in_precision=True,
    loss_copies=None,  # flash-attn losses/cross_entropy.py, inplace_backward
)

MINDSPORE = replace(
    TORCH, name="mindspore", keeps_shards=False, recomputes_unread=True, steps_together=False
)  # Cell.recompute runs all of a cell again

XLA = replace(
    TORCH_FUSED_LOSS,  # XLA fuses the loss into what makes logits
    name="xla",
    keeps_shards=False,
    keeps_gates=False,  # XLA fuses what is done point by point
    flattens_gradients=False,  # a collective reads the gradient where the product has put it
    steps_together=False,  # XLA fuses the update of each parameter
    recomputes_unread=False,  # jax/_src/ad_checkpoint.py, remat_dce: what is not read is dead code
    shares_weights=True,  # Xu et al. 2021, "GSPMD" (arXiv 2105.04663): the partitioner sees operators one by one
)

FRAMEWORKS = {
    framework.name: framework
    for framework in (
        MEGATRON,
        MEGATRON_2021,
        MEGATRON_DEEPSPEED,
        NEMO,
        TORCH,
        TORCHTITAN,
        TORCH_FUSED_LOSS,
        UNKNOWN,
        MINDSPORE,
        XLA,
        MEGATRON_PLAIN_LOSS,
        MEGATRON_PLAIN,
    )
}
"""Frameworks by name."""
