-- Drop the oldest partition whose tasks were scheduled more than 30 days ago and have all ended. Run it daily:
-- with nothing to drop it reads a few index pages.
DO $$
DECLARE
    before_id bigint :=
        (extract(epoch FROM now() - interval '30 days') * 1000 - 1577836800000)::bigint << 22;
    has_unfinished text := 'SELECT EXISTS (SELECT FROM %1$s WHERE status IN (0, 3))
        OR EXISTS (SELECT FROM %1$s WHERE status = 5)';
    is_needed boolean;
    week record;
BEGIN
    SET LOCAL lock_timeout = '2s';
    FOR week IN
        SELECT c.oid::regclass AS name, bound.ends FROM pg_inherits i
        JOIN pg_class c ON c.oid = i.inhrelid, LATERAL (SELECT
            substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''?(\d+)')::bigint AS ends
        ) AS bound
        WHERE i.inhparent = 'yb_delay_task_message'::regclass AND bound.ends <= before_id
        ORDER BY bound.ends
    LOOP
        EXECUTE format(has_unfinished, week.name) INTO is_needed;
        CONTINUE WHEN is_needed;
        -- Nobody can run a failed task again from here on.
        LOCK TABLE yb_delay_task_message IN ACCESS EXCLUSIVE MODE;
        EXECUTE format(has_unfinished, week.name) INTO is_needed;
        CONTINUE WHEN is_needed;
        EXECUTE format('DELETE FROM yb_delay_attempt AS a USING %s AS t WHERE t.id = a.task_id',
            week.name);
        EXECUTE format('DROP TABLE %s', week.name);
        RAISE NOTICE 'dropped %', week.name;
        EXIT;
    END LOOP;
END $$;
