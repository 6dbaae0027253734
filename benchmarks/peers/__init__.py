"""Other systems for delayed tasks, measured beside this project: `./dev bench --peers`.

They live in an environment of their own. Each has a small program in `programs/`, which schedules what it is told and,
where the system brings no command for it, is the worker; what is measured is the same for all, in `workloads.py`."""
