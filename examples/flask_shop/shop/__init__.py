"""A small shop. `SHOP_DATABASE_URL` and `CELERY_BROKER_URL` configure its servers."""

import os

from flask import Flask

from shop.extensions import db, delays


def create_app() -> Flask:
    app = Flask("shop")
    app.config.update(
        SQLALCHEMY_DATABASE_URI=os.environ.get("SHOP_DATABASE_URL", "sqlite:///shop.sqlite3"),
        CELERY={
            "broker_url": os.environ.get("CELERY_BROKER_URL", "redis://127.0.0.1:6379/0"),
            "broker_connection_retry_on_startup": True,
        },
        DELAYTASKS={"namespace": os.environ.get("SHOP_NAMESPACE", "shop")},
        # An order that is not paid by then is closed.
        SHOP_PAY_WITHIN_S=float(os.environ.get("SHOP_PAY_WITHIN_S", "2")),
    )
    db.init_app(app)
    delays.init_app(app)

    from shop.orders import orders

    app.register_blueprint(orders)

    @app.cli.command()
    def create_tables() -> None:
        """The shop's own tables; `delaytasks -A shop db upgrade` makes the others."""
        db.create_all()

    return app
