"""Casts of 16-bit tensors to fp8: where their scales come from, and the bytes that they move."""

DELAYED_SCALING, TENSOR_SCALING, ROW_SCALING = "delayed", "tensor", "row"
SCALINGS = (DELAYED_SCALING, TENSOR_SCALING, ROW_SCALING)
"""Where a cast to fp8 has its scales from: earlier steps, the largest value of the tensor, or that of each row."""
CAST_KERNELS = {DELAYED_SCALING: 1, TENSOR_SCALING: 3, ROW_SCALING: 2}
CAST_BYTES = {DELAYED_SCALING: 4, TENSOR_SCALING: 7, ROW_SCALING: 5}
"""Bytes that casts move for an element of 16 bits. With scales of earlier steps one kernel reads it and writes two
layouts (Transformer Engine's fused cast and transpose). With one of the tensor a kernel reads it to find the largest
value, a second reads it again and writes it in fp8, a third reads that and writes the other layout. With one of each
row it is read twice and written once, for one product."""
ROW_BACKWARD_BYTES = 22
"""The same in backward with a scale of each row, where rows run along the dim that is not contiguous, for an element of
an input, of a weight or of the gradient of a result. It is what kernels take as if they streamed, which those that
torch.compile makes of such casts do not. Two layers of Llama with torchao 0.18 on an H200
(``reports/executor/device-kernels-h200.jsonl``) take 8.4 and 5.7 ms longer in backward with a scale a row than with one
a tensor: at 4.48 TB/s, and an input that several products read cast once, 20 and 26 bytes; 22 is near their mean."""
