"""Which of several databases a task belongs to."""

from __future__ import annotations

from hashlib import blake2b


def home_of(tag: str, key: str, shards: int) -> int:
    """The shard where a key's tasks are scheduled: the one whose number and the key have the highest hash together. A
    new shard takes keys from each of the others, and no key moves between those."""
    if shards == 1:
        return 0
    name = f"{tag}\0{key}".encode(errors="surrogatepass")
    return max(
        range(shards), key=lambda shard: blake2b(name, digest_size=8, salt=b"%d" % shard).digest()
    )
