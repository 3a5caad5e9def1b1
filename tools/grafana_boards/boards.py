"""All boards, in the order of the documentation."""

from tools.grafana_boards.fleet import FLEET
from tools.grafana_boards.inference import INFERENCE
from tools.grafana_boards.jobs import JOBS
from tools.grafana_boards.overview import OVERVIEW
from tools.grafana_boards.service import SERVICE
from tools.grafana_boards.solver_and_scheduler import SCHEDULER

BOARDS = (OVERVIEW, FLEET, INFERENCE, JOBS, SCHEDULER, SERVICE)
