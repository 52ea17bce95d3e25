"""The metrics of a server, in the format of Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Counters of one server. Labels have few values, whatever clients send."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "vitral_requests", "Responses by route and status.", ("route", "status"), registry=registry
        )
        self.seconds = Histogram(
            "vitral_request_seconds",
            "Time from the headers to the response.",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        self.batch_size = Histogram("vitral_batch_size", "Images per batch.", buckets=SIZES, registry=registry)
        self.computing = Counter(
            "vitral_compute_seconds", "Seconds that workers computed batches.", ("model",), registry=registry
        )
        self.queue = Gauge("vitral_queue_images", "Images that wait for a worker.", ("model",), registry=registry)
        self.pending = Gauge("vitral_pending_images", "Images without a result.", ("model",), registry=registry)
        self.workers = Gauge("vitral_workers", "Workers that are ready.", ("model",), registry=registry)
        self.refused = Counter("vitral_refused", "Refused requests by cause.", ("cause",), registry=registry)
        self.bad_images = Counter("vitral_bad_images", "Unusable images by cause.", ("cause",), registry=registry)
        self.dropped = Counter(
            "vitral_dropped_images", "Images whose client left or whose deadline passed.", registry=registry
        )
        self.unread = Gauge("vitral_unread_bytes", "Bytes of responses that clients have not read.", registry=registry)
        self.stuck = Counter(
            "vitral_stuck_connections", "Connections closed because the client did not read.", registry=registry
        )
        self.restarts = Counter(
            "vitral_worker_restarts", "Workers that ended and were started again.", registry=registry
        )

    def render(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)
