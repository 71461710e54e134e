"""The client: `leased.Client`, its answers and errors, and the `lease` command.

Nothing is imported before it is used: the command's start-up time is a promise.

    core.py       requests and answers as values, no I/O
    answers.py    what the daemon can answer, as types
    errors.py     what a client can raise
    wire.py       one connection, shared by threads
    calling.py    reconnects, repeats what is safe to repeat
    sync.py       `Client`: every operation as a method
    scopes.py     what is told about a scope: its switch, what a successor finds
    watching.py   `client.watch(...)`: events and gaps, on a connection of their own
    held.py       `with client.lease(...)`: a thread renews until the block ends
    command.py    the `lease` command; *verbs.py are its verbs, wording.py its sentences
"""
