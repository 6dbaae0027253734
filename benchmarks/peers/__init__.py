"""Measure other systems for delayed tasks in comparison with this project: `./dev bench --peers`.

They are installed in a separate environment. Each system has a small program in `programs/` that
schedules the requested tasks. If the system has no worker command, the program is also the worker.
`workloads.py` defines the measurements, which are the same for all.
"""
