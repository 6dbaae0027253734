"""The shard of a key."""

from __future__ import annotations

from hashlib import blake2b


def home_of(tag: str, key: str, shards: int) -> int:
    """Return the shard in which the tasks of a key are scheduled, by rendezvous hashing.

    A new shard takes keys from every other shard, and no key moves between the others.
    """
    if shards == 1:
        return 0
    name = f"{tag}\0{key}".encode(errors="surrogatepass")
    return max(
        range(shards), key=lambda shard: blake2b(name, digest_size=8, salt=b"%d" % shard).digest()
    )
