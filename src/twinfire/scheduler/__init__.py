"""What runs in the next step.

`sequence` is one choice of a request and all that is known of it, `scheduler` decides for one step
under a `scheduler_config` and says so in a `step_plan`. It ranks who waits in a `waiting_queue`,
gives blocks through `block_tables`, lets bursts share work by `prefixes_in_flight` and takes
sequences whose prompts other workers compute through `arrivals`; `size_limit` refuses what could
never run. Token ids and block ids only.
"""
