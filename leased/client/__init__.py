"""The client: `leased.Client`, its answers and errors, and the `lease` command.

Nothing is imported before it is used: the command's start-up time is a promise.

    core.py       requests and answers as values, no I/O
    answers.py    what the daemon can answer, as types
    errors.py     what a client can raise
    wire.py       one connection, shared by threads
    sync.py       `Client`: reconnects, repeats what is safe to repeat
    held.py       `with client.lease(...)`: a thread renews until the block ends
    command.py    the `lease` command; verbs.py and wording.py are its verbs and sentences
"""
