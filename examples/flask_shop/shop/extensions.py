from flask_sqlalchemy import SQLAlchemy

from delaytasks.contrib.flask import FlaskDelays

# A commit in a test that has a transaction ends a savepoint only.
db = SQLAlchemy(session_options={"join_transaction_mode": "create_savepoint"})
delays = FlaskDelays()
