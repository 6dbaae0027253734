"""The figures: what delaytasks costs and gains against bare Celery eta, on the same broker, in the same run."""
