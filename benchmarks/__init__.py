"""Benchmarks: the costs and gains of delaytasks compared with bare Celery eta, on the same broker,
in the same run.
"""
