"""What runs in the next step.

`sequence` is one choice of a request and all that is known of it, `step_plan` the decision for one
step, `scheduler` makes it: token budget, admission, preemption. Token ids and block ids only.
"""
