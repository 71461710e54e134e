"""A user of tooz, moved over: the URL changed, nothing else did."""

from tooz import coordination

coordinator = coordination.get_coordinator("leased+unix://", b"worker-1")  # was: "redis://localhost:6379"
coordinator.start(start_heart=True)

with coordinator.get_lock(b"report")(timeout=10) as lock:
    print(f"mine: {lock.acquired}, with a generation above 0: {lock.generation > 0}")  # generation: new, for the store written to
print(f"mine afterwards: {lock.acquired}")
coordinator.stop()
