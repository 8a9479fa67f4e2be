"""HTML pages about plans, for people. Nothing here imports torch."""

from .plan_page import plan_page as plan_page
