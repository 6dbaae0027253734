-- Move tasks from the default partition, where they are if maintain.sql has not run for weeks.
CALL partman.partition_data_proc('public.yb_delay_task_message');
