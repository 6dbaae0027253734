"""Where delaytasks meets other frameworks. Nothing else imports these modules."""
