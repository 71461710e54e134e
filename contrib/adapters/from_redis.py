"""A user of redis-py's Lock, moved over: the imports and the connection changed, the use of the lock did not."""

from leased import Client  # was: from redis import Redis
from leased.adapters.redis_lock import Lock  # was: from redis.lock import Lock

connection = Client()  # was: Redis()

with Lock(connection, "report", timeout=30, blocking_timeout=10) as lock:
    lock.extend(30)
    print(f"mine: {lock.owned()}, with a generation above 0: {lock.generation > 0}")  # generation: new, for the store written to
print(f"held afterwards: {Lock(connection, 'report').locked()}")
