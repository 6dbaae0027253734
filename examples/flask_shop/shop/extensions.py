from flask_sqlalchemy import SQLAlchemy

from delaytasks.contrib.flask import FlaskDelays

db = SQLAlchemy()
delays = FlaskDelays()
