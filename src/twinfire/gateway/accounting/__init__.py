"""Accounts at the gateway: who calls, whether there is room, and a record of each request.

`access` knows every token, `admission` takes limits before a request runs, `bill` follows it to its
record, `usage_writer` commits records, `accounting` is what handlers see of all of it.
"""
