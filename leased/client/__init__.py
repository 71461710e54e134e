"""The client: `leased.Client`, its answers and errors, and the `lease` command.

Nothing is imported before it is used: the command's start-up time is a promise.

    without I/O, shared by all faces
        core.py       requests and answers as values
        questions.py  what can be asked, and what its answer means
        attempt.py    what is asked again when the connection is lost
        keeping.py    when a lease is renewed, and when it is lost
        answers.py    what the daemon can answer, as types
        scopes.py     what is told about a scope: its switch, what a successor finds
        errors.py     what a client can raise
    with threads
        wire.py       one connection, shared by threads
        calling.py    a connection that comes and goes
        sync.py       `Client`: every operation as a method
        held.py       `with client.lease(...)`: a thread renews until the block ends
        watching.py   `client.watch(...)`: events and gaps, on a connection of their own
    with tasks: async_*.py, the same for `AsyncClient`; face.py says what it needs of trio_face.py or asyncio_face.py
    decorating.py     `@client.leased(...)`
    fake_*.py         what `leased.testing.FakeLeased` is made of
    command.py    the `lease` command; *verbs.py are its verbs, wording.py its sentences, as_json.py its records
"""
