"""The reference op set, on torch: readable, and runs wherever torch does.

`weights` and `step` implement the two halves of `kernels.ops` over one `numerics` strategy:
`exact` (float32, every row the same bits whatever shares its step) or `fast` (16-bit and GPU).
`kv_memory` owns the blocks' bytes, `attention_plan` says what each step's attention reads,
`linear` packs matrices.
"""
