-- The statements of `delaytasks/db/claims.py`: each choice of rows, on each database.
-- `tests/conformance/test_claims.py` compares them, apart from blanks, and runs them.

-- postgresql_listed
UPDATE yb_delay_task_message
SET status = 3,
    version = CASE
        WHEN version < CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)
        THEN CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)
        ELSE CASE WHEN version < 4611686018427387904 THEN version + 1 ELSE 0 END
            + CAST(floor(random() * 2147483647) AS BIGINT)
    END,
    runs = CASE WHEN runs < 2147483647 THEN runs + 1 ELSE runs END,
    execution_time = clock_timestamp(),
    update_time = clock_timestamp(),
    lease_until = clock_timestamp() + 60.0 * interval '1 second',
    worker = :worker,
    ip_address = 2130706433
WHERE id = ANY (ARRAY(
    SELECT id FROM yb_delay_task_message
    WHERE id = ANY (:ids)
        AND id BETWEEN :first AND :last
        AND version = :version
        AND status + 0 = :status
        AND lapses <= :lapses
        AND expected_time <= clock_timestamp()
    ORDER BY id
    FOR UPDATE SKIP LOCKED
))
    AND id BETWEEN :first AND :last
    AND (SELECT set_config('synchronous_commit',
        CASE current_setting('synchronous_standby_names')
            WHEN '' THEN 'off' ELSE current_setting('synchronous_commit') END, true)) IS NOT NULL
RETURNING id, tag, message_body, expected_time, status, version, queue, priority, task_key,
    delay_time, runs, lapses, headers, limit_key, create_time, due_time, meta, cancel_request,
    late_by;

-- postgresql_joined
UPDATE yb_delay_task_message
SET status = 3,
    version = CASE
        WHEN version < CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)
        THEN CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)
        ELSE CASE WHEN version < 4611686018427387904 THEN version + 1 ELSE 0 END
            + CAST(floor(random() * 2147483647) AS BIGINT)
    END,
    runs = CASE WHEN runs < 2147483647 THEN runs + 1 ELSE runs END,
    execution_time = clock_timestamp(),
    update_time = clock_timestamp(),
    lease_until = clock_timestamp() + 60.0 * interval '1 second',
    worker = :worker,
    ip_address = 2130706433
WHERE id = ANY (ARRAY(
    SELECT id FROM yb_delay_task_message
    JOIN (SELECT * FROM json_to_recordset(CAST(:rows AS JSON)) AS j (wanted_id BIGINT,
        wanted_version BIGINT,
        wanted_status SMALLINT,
        most_lapses INTEGER)) AS w
        ON id = wanted_id
    WHERE version = wanted_version
        AND status + 0 = wanted_status
        AND lapses <= most_lapses
        AND expected_time <= clock_timestamp()
        AND id = ANY (:ids)
        AND id BETWEEN :first AND :last
    ORDER BY id
    FOR UPDATE SKIP LOCKED
))
    AND id BETWEEN :first AND :last
    AND (SELECT set_config('synchronous_commit',
        CASE current_setting('synchronous_standby_names')
            WHEN '' THEN 'off' ELSE current_setting('synchronous_commit') END, true)) IS NOT NULL
RETURNING id, tag, message_body, expected_time, status, version, queue, priority, task_key,
    delay_time, runs, lapses, headers, limit_key, create_time, due_time, meta, cancel_request,
    late_by;

-- postgresql_oldest
UPDATE yb_delay_task_message
SET status = 3,
    version = CASE
        WHEN version < CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)
        THEN CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)
        ELSE CASE WHEN version < 4611686018427387904 THEN version + 1 ELSE 0 END
            + CAST(floor(random() * 2147483647) AS BIGINT)
    END,
    runs = CASE WHEN runs < 2147483647 THEN runs + 1 ELSE runs END,
    execution_time = clock_timestamp(),
    update_time = clock_timestamp(),
    lease_until = clock_timestamp() + 60.0 * interval '1 second',
    worker = :worker,
    ip_address = 2130706433
WHERE id = ANY (ARRAY(
    SELECT id FROM yb_delay_task_message
    WHERE status = 0
        AND queue = :queue
        AND queue BETWEEN (SELECT :queue) AND (SELECT :queue)
        AND priority = :priority
        AND expected_time BETWEEN :due_from AND (SELECT clock_timestamp())
        AND lapses = 0
    ORDER BY expected_time LIMIT :most
    FOR UPDATE SKIP LOCKED
))
    AND (SELECT set_config('synchronous_commit',
        CASE current_setting('synchronous_standby_names')
            WHEN '' THEN 'off' ELSE current_setting('synchronous_commit') END, true)) IS NOT NULL
RETURNING id, tag, message_body, expected_time, status, version, queue, priority, task_key,
    delay_time, runs, lapses, headers, limit_key, create_time, due_time, meta, cancel_request,
    late_by;

-- postgresql_recovered
UPDATE yb_delay_task_message
SET status = 3,
    version = CASE
        WHEN version < CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)
        THEN CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)
        ELSE CASE WHEN version < 4611686018427387904 THEN version + 1 ELSE 0 END
            + CAST(floor(random() * 2147483647) AS BIGINT)
    END,
    runs = CASE WHEN runs < 2147483647 THEN runs + 1 ELSE runs END,
    execution_time = clock_timestamp(),
    update_time = clock_timestamp(),
    lease_until = clock_timestamp() + 60.0 * interval '1 second',
    worker = :worker,
    ip_address = 2130706433
WHERE id = ANY (ARRAY(
    SELECT id FROM yb_delay_task_message
    WHERE status = 0
        AND queue = :queue
        AND queue BETWEEN (SELECT :queue) AND (SELECT :queue)
        AND priority = :priority
        AND expected_time BETWEEN (SELECT CAST('-infinity' AS TIMESTAMPTZ))
            AND (SELECT clock_timestamp())
        AND lapses > 0
    ORDER BY lapses, expected_time LIMIT 1
    FOR UPDATE SKIP LOCKED
))
    AND (SELECT set_config('synchronous_commit',
        CASE current_setting('synchronous_standby_names')
            WHEN '' THEN 'off' ELSE current_setting('synchronous_commit') END, true)) IS NOT NULL
RETURNING id, tag, message_body, expected_time, status, version, queue, priority, task_key,
    delay_time, runs, lapses, headers, limit_key, create_time, due_time, meta, cancel_request,
    late_by;

-- postgresql_locked
UPDATE yb_delay_task_message
SET status = 3,
    version = CASE
        WHEN version < CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)
        THEN CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)
        ELSE CASE WHEN version < 4611686018427387904 THEN version + 1 ELSE 0 END
            + CAST(floor(random() * 2147483647) AS BIGINT)
    END,
    runs = CASE WHEN runs < 2147483647 THEN runs + 1 ELSE runs END,
    execution_time = clock_timestamp(),
    update_time = clock_timestamp(),
    lease_until = clock_timestamp() + 60.0 * interval '1 second',
    worker = :worker,
    ip_address = 2130706433
WHERE id = ANY (:ids) AND id BETWEEN :first AND :last
RETURNING id, version;

-- mysql_listed
SELECT id, tag, message_body, expected_time, status, version, queue, priority, task_key,
    delay_time, runs, lapses, headers, limit_key, create_time, due_time, meta, cancel_request,
    late_by
FROM yb_delay_task_message FORCE INDEX (`PRIMARY`)
WHERE id IN :ids
    AND version = :version
    AND status + 0 = :status
    AND lapses <= :lapses
    AND expected_time <= UTC_TIMESTAMP(6)
ORDER BY id
FOR UPDATE SKIP LOCKED;

-- mysql_joined
SELECT id, tag, message_body, expected_time, status, version, queue, priority, task_key,
    delay_time, runs, lapses, headers, limit_key, create_time, due_time, meta, cancel_request,
    late_by
FROM yb_delay_task_message FORCE INDEX (`PRIMARY`)
JOIN (SELECT * FROM JSON_TABLE(:rows, '$[*]' COLUMNS (
    wanted_id BIGINT PATH '$.wanted_id',
    wanted_version BIGINT PATH '$.wanted_version',
    wanted_status SMALLINT PATH '$.wanted_status',
    most_lapses INTEGER PATH '$.most_lapses')) AS j) AS w
    ON id = wanted_id
WHERE version = wanted_version
    AND status + 0 = wanted_status
    AND lapses <= most_lapses
    AND expected_time <= UTC_TIMESTAMP(6)
ORDER BY id
FOR UPDATE SKIP LOCKED;

-- mysql_oldest
SELECT id, tag, message_body, expected_time, status, version, queue, priority, task_key,
    delay_time, runs, lapses, headers, limit_key, create_time, due_time, meta, cancel_request,
    late_by
FROM yb_delay_task_message FORCE INDEX (`idx_yb_delay_hot`)
WHERE status = 0
    AND queue = :queue
    AND priority = :priority
    AND expected_time BETWEEN :due_from AND (SELECT UTC_TIMESTAMP(6))
    AND lapses = 0
ORDER BY expected_time LIMIT :most
FOR UPDATE SKIP LOCKED;

-- mysql_recovered
SELECT id, tag, message_body, expected_time, status, version, queue, priority, task_key,
    delay_time, runs, lapses, headers, limit_key, create_time, due_time, meta, cancel_request,
    late_by
FROM yb_delay_task_message FORCE INDEX (`idx_yb_delay_hot`)
WHERE status = 0
    AND queue = :queue
    AND priority = :priority
    AND expected_time <= (SELECT UTC_TIMESTAMP(6))
    AND lapses > 0
ORDER BY lapses, expected_time LIMIT 1
FOR UPDATE SKIP LOCKED;

-- mysql_locked
UPDATE yb_delay_task_message FORCE INDEX (`PRIMARY`)
SET status = 3,
    version = CASE WHEN version < 4611686018427387904 THEN version + 1 ELSE 0 END,
    runs = CASE WHEN runs < 2147483647 THEN runs + 1 ELSE runs END,
    execution_time = UTC_TIMESTAMP(6),
    update_time = UTC_TIMESTAMP(6),
    lease_until = UTC_TIMESTAMP(6) + INTERVAL 60000000 MICROSECOND,
    worker = :worker,
    ip_address = 2130706433
WHERE id IN :ids;

-- sqlite_joined
UPDATE yb_delay_task_message
SET status = 3,
    version = CASE WHEN version < 4611686018427387904 THEN version + 1 ELSE 0 END,
    runs = CASE WHEN runs < 2147483647 THEN runs + 1 ELSE runs END,
    execution_time = strftime('%Y-%m-%d %H:%M:%f000', 'now'),
    update_time = strftime('%Y-%m-%d %H:%M:%f000', 'now'),
    lease_until = strftime('%Y-%m-%d %H:%M:%f000', 'now', '+60.000000 seconds'),
    worker = :worker,
    ip_address = 2130706433
WHERE id IN (
    SELECT id FROM yb_delay_task_message
    JOIN (SELECT
        json_extract(value, '$.wanted_id') AS wanted_id,
        json_extract(value, '$.wanted_version') AS wanted_version,
        json_extract(value, '$.wanted_status') AS wanted_status,
        json_extract(value, '$.most_lapses') AS most_lapses
        FROM json_each(:rows)) AS w
        ON id = wanted_id
    WHERE version = wanted_version
        AND status + 0 = wanted_status
        AND lapses <= most_lapses
        AND expected_time <= strftime('%Y-%m-%d %H:%M:%f000', 'now')
    ORDER BY id
)
RETURNING id, tag, message_body, expected_time, status, version, queue, priority, task_key,
    delay_time, runs, lapses, headers, limit_key, create_time, due_time, meta, cancel_request,
    late_by;

-- sqlite_oldest
UPDATE yb_delay_task_message
SET status = 3,
    version = CASE WHEN version < 4611686018427387904 THEN version + 1 ELSE 0 END,
    runs = CASE WHEN runs < 2147483647 THEN runs + 1 ELSE runs END,
    execution_time = strftime('%Y-%m-%d %H:%M:%f000', 'now'),
    update_time = strftime('%Y-%m-%d %H:%M:%f000', 'now'),
    lease_until = strftime('%Y-%m-%d %H:%M:%f000', 'now', '+60.000000 seconds'),
    worker = :worker,
    ip_address = 2130706433
WHERE id IN (
    SELECT id FROM yb_delay_task_message
    WHERE status = 0
        AND queue = :queue
        AND priority = :priority
        AND expected_time BETWEEN :due_from AND (SELECT strftime('%Y-%m-%d %H:%M:%f000', 'now'))
        AND lapses = 0
    ORDER BY expected_time LIMIT :most
)
RETURNING id, tag, message_body, expected_time, status, version, queue, priority, task_key,
    delay_time, runs, lapses, headers, limit_key, create_time, due_time, meta, cancel_request,
    late_by;

-- sqlite_recovered
UPDATE yb_delay_task_message
SET status = 3,
    version = CASE WHEN version < 4611686018427387904 THEN version + 1 ELSE 0 END,
    runs = CASE WHEN runs < 2147483647 THEN runs + 1 ELSE runs END,
    execution_time = strftime('%Y-%m-%d %H:%M:%f000', 'now'),
    update_time = strftime('%Y-%m-%d %H:%M:%f000', 'now'),
    lease_until = strftime('%Y-%m-%d %H:%M:%f000', 'now', '+60.000000 seconds'),
    worker = :worker,
    ip_address = 2130706433
WHERE id IN (
    SELECT id FROM yb_delay_task_message
    WHERE status = 0
        AND queue = :queue
        AND priority = :priority
        AND expected_time <= (SELECT strftime('%Y-%m-%d %H:%M:%f000', 'now'))
        AND lapses > 0
    ORDER BY lapses, expected_time LIMIT 1
)
RETURNING id, tag, message_body, expected_time, status, version, queue, priority, task_key,
    delay_time, runs, lapses, headers, limit_key, create_time, due_time, meta, cancel_request,
    late_by;

-- sqlite_locked
UPDATE yb_delay_task_message
SET status = 3,
    version = CASE WHEN version < 4611686018427387904 THEN version + 1 ELSE 0 END,
    runs = CASE WHEN runs < 2147483647 THEN runs + 1 ELSE runs END,
    execution_time = strftime('%Y-%m-%d %H:%M:%f000', 'now'),
    update_time = strftime('%Y-%m-%d %H:%M:%f000', 'now'),
    lease_until = strftime('%Y-%m-%d %H:%M:%f000', 'now', '+60.000000 seconds'),
    worker = :worker,
    ip_address = 2130706433
WHERE id IN :ids
RETURNING id, version;
