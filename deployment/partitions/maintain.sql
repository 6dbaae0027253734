-- Make partitions ahead of time. Run it daily.
SELECT partman.run_maintenance('public.yb_delay_task_message');
