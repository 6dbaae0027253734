"""A demo, `./dev demo`: a shop that closes unpaid orders, while a worker and a payment partner
fail.

Read `shop.py` (the processors of the shop) and `story.py` (the events). The other modules start
processes and draw the display.
"""
