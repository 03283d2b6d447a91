"""Accounts, their tokens and limits, prices, and what was used: the numbers a bill is made of.

`database` opens SQLite or PostgreSQL and brings its tables up to date; every store is a file with
its own tables (`account_store`, `usage_store`, `shared_rates`). `account`, `api_token`, `limits`,
`prices`, `usage_record` are plain values. Knows nothing of HTTP; all of it blocks, so that an event
loop calls it from a thread.
"""
