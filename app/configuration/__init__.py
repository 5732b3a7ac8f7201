"""The fields of `Settings` by area, each with its checks; `app/settings.py` composes them."""
