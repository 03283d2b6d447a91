"""KV blocks between workers.

`connector` is the interface that reads another worker's blocks, `socket_connector` and
`nixl_connector` are its implementations; `lease` bounds how long anything is held for somebody
else; `hand_off_sender` and `hand_off_receiver` are the two sides of a hand-off, each with a
`hand_off_table`, `prefix_pull` and `prefix_holder` those of a pull, as state machines that know no
sockets (`ports` is what they need of a worker); `fault_points` names the places where tests can
make a worker fail.
"""
