"""One op set, several siblings: everything that computes on tensors.

`ops` is the interface that models are written over, `step_batch` what one step feeds them and
`sampling_ops` what drawing tokens needs, all free of any array library's types but numpy's.
`torch/` is the readable reference that runs anywhere.
"""
