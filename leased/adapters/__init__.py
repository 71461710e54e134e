"""For programs that already speak to another lock library: the same shapes, on leases.

Nothing here is imported by the rest of leased.

    acquiring.py      asks until granted, refused for good, or out of time
    redis_errors.py   redis-py's exceptions where it is installed, else ours of the same shape
    redis_lock.py     `Lock`, with the arguments and methods of redis-py's
    tooz_driver.py    the driver that tooz finds as `leased+unix://` (leased[tooz])
"""
