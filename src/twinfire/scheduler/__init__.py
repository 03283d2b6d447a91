"""What runs in the next step.

`sequence` is one choice of a request and all that is known of it, `scheduler` decides for one step
under a `scheduler_config` and says so in a `step_plan`, which a `step_planner` fills. A `line_up`
is who runs and who waits, ranked in a `waiting_queue`; a `prompt_turn` says whose prompt is next,
and `newcomers` who may start with it. Blocks are given through `block_tables`,
bursts share work by `prefixes_in_flight`, and sequences whose prompts other workers compute come
through `arrivals`; `size_limit` refuses what could never run. Token ids and block ids only.
"""
