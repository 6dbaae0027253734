"""A shop that closes unpaid orders, with everything that goes wrong in a minute of its life: `./dev demo`.

Read `shop.py` (what the shop runs) and `story.py` (what happens to it); the rest starts processes and draws.
"""
