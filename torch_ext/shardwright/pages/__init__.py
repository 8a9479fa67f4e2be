"""HTML pages about plans. Nothing here imports torch."""

from .plan_page import plan_page as plan_page
