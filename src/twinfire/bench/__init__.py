"""A load client against any OpenAI-compatible server. Imports nothing of the engine.

What is sent: `target`, `request`, `prompt_source` (real text), `token_counter` and `prompt_builder`
(sized in the server's tokens), `trace`, `parameters` to `scenarios` to `workloads` (when each
request starts). What comes back: `sse`, `stream_events`, `client`, `request_record`. What is said
of it: `distribution`, `load_metrics` (the definitions), `load_report`, `report_table`,
`report_plot`. `load_run` joins them. Servers as processes: `process_tree`, `server_process`,
`startup`, `machine`, `prometheus_text`.
"""
