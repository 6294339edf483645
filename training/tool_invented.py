"""Functions that nobody wrote, put together from words, each with a question that calls it.

A drafter that has seen a hundred functions knows those. Names and arguments in thousands of
combinations and spellings teach it what calls have in common: to go on with what the prompt says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from forerun.training.calls import Call

VERBS = (
    "get", "find", "list", "search", "create", "update", "delete", "cancel", "book", "send",
    "check", "calculate", "compare", "convert", "track", "export", "import", "schedule", "assign",
    "approve", "archive", "analyze", "estimate", "filter", "fetch", "generate", "print", "renew",
    "report", "reset", "review", "sort", "start", "stop", "submit", "summarize", "transfer",
    "translate", "validate", "verify",
)  # fmt: skip
NOUNS = (
    "invoice", "flight", "hotel", "ticket", "order", "parcel", "weather forecast", "stock price",
    "exchange rate", "recipe", "playlist", "movie", "concert", "restaurant", "reservation",
    "customer account", "user profile", "password", "shipment", "subscription", "meeting", "task",
    "reminder", "news article", "job offer", "bus route", "train schedule", "rental car",
    "apartment", "insurance policy", "loan", "bank transfer", "tax return", "medical record",
    "prescription", "workout plan", "diet plan", "blood test", "course", "exam result", "lecture",
    "student record", "library book", "research paper", "photo album", "video clip", "podcast",
    "survey", "form", "database table", "backup", "log file", "server", "container", "network",
    "firewall rule", "deployment", "build", "pull request", "issue", "branch", "dashboard",
    "sales report", "budget", "inventory", "price list", "discount code", "gift card", "warranty",
    "repair", "sensor reading", "thermostat", "camera", "door lock", "light", "vacuum robot",
    "polygon", "matrix", "probability", "distance", "triangle", "projectile", "orbit", "molecule",
    "protein", "genome", "population", "earthquake", "river level", "air quality", "football match",
    "tournament", "player", "league table", "museum", "painting", "court case", "contract",
)  # fmt: skip
NAMESPACES = (
    "api", "app", "billing", "calendar", "cloud", "crm", "data", "finance", "geo", "health", "home",
    "hr", "library", "mail", "maps", "math", "media", "music", "ops", "shop", "sports", "store",
    "support", "travel", "utils", "weather",
)  # fmt: skip
CITIES = (
    "New York", "San Francisco, CA", "Boston, MA", "Paris", "Berlin", "Tokyo", "Sydney", "Madrid",
    "Mumbai", "Nairobi", "Toronto", "Chicago, IL", "Austin, Texas", "Lima", "Seoul", "Stockholm",
    "Cape Town", "Buenos Aires", "Singapore", "Vienna", "Cairo", "London, UK", "Denver", "Hanoi",
)  # fmt: skip
FIRST = (
    "Alice", "John", "Priya", "Wei", "Carlos", "Fatima", "Emma", "Liam", "Sofia", "Noah", "Yuki",
    "Omar", "Grace", "Ivan", "Chloe", "Raj", "Hannah", "Diego", "Mei", "Samuel",
)  # fmt: skip
LAST = (
    "Smith", "Johnson", "Patel", "Chen", "Garcia", "Khan", "Brown", "Murphy", "Rossi", "Kim",
    "Tanaka", "Hassan", "Miller", "Petrov", "Martin", "Singh", "Weber", "Lopez", "Nguyen", "Clark",
)  # fmt: skip
WORDS = (
    "red", "blue", "green", "large", "small", "wireless", "organic", "summer", "winter", "modern",
    "classic", "alpha", "delta", "north", "harbor", "silver", "golden", "rapid", "quiet", "solar",
    "project", "garden", "market", "river", "studio", "sunset", "planet", "engine", "bridge",
)  # fmt: skip
ASK = (
    "{}.", "{}, please.", "Please {}.", "Can you {}?", "Could you {}?", "I'd like to {}.",
    "I need to {}.", "Help me {}.", "Would you {} for me?", "I want you to {}.",
)  # fmt: skip
ALIKE = 0.4
"""Share of the prompts that offer further functions."""


def _one(*choices: str) -> Callable[[random.Random], str]:
    return lambda draw: draw.choice(choices)


def _number(low: int, high: int, unit: str = "") -> Callable[[random.Random], str]:
    return lambda draw: f"{draw.randint(low, high)}{unit}"


def _decimal(low: int, high: int) -> Callable[[random.Random], str]:
    return lambda draw: f"{draw.uniform(low, high):.{draw.randint(1, 4)}f}"


def _date(draw: random.Random) -> str:
    year, month, day = draw.randint(2015, 2026), draw.randint(1, 12), draw.randint(1, 28)
    months = ("January", "March", "May", "June", "July", "October", "December")
    return draw.choice(
        (f"{year}-{month:02d}-{day:02d}", f"{draw.choice(months)} {day}, {year}", f"{day}/{month}")
    )


def _person(draw: random.Random) -> str:
    return f"{draw.choice(FIRST)} {draw.choice(LAST)}"


def _email(draw: random.Random) -> str:
    name = f"{draw.choice(FIRST)}{draw.choice(('.', '_', ''))}{draw.choice(LAST)}".lower()
    return f"{name}@{draw.choice(WORDS)}{draw.choice(('.com', '.org', 'mail.com', '.io'))}"


def _code(draw: random.Random) -> str:
    letters = "".join(draw.choices("ABCDEFGHKLMNPRSTUVWXZ", k=draw.randint(1, 3)))
    return f"{letters}{draw.choice(('', '-', '_'))}{draw.randint(10, 99999)}"


def _words(draw: random.Random) -> str:
    return " ".join(draw.sample(WORDS, draw.randint(1, 3)))


def _path(draw: random.Random) -> str:
    folders = "/".join(draw.sample(WORDS, draw.randint(1, 3)))
    return f"/{folders}/{draw.choice(WORDS)}.{draw.choice(('csv', 'txt', 'json', 'pdf', 'png'))}"


def _url(draw: random.Random) -> str:
    return f"https://{draw.choice(WORDS)}{draw.choice(WORDS)}.com/{draw.choice(WORDS)}"


def _list(draw: random.Random) -> str:
    return "[" + ", ".join(str(draw.randint(1, 99)) for _ in range(draw.randint(2, 6))) + "]"


ARGUMENTS: tuple[tuple[str, str, Callable[[random.Random], str]], ...] = (
    ("city", "in {}", _one(*CITIES)),
    ("location", "near {}", _one(*CITIES)),
    ("origin", "from {}", _one(*CITIES)),
    ("destination", "to {}", _one(*CITIES)),
    ("country", "in {}", _one("France", "Brazil", "Japan", "Canada", "Kenya", "Norway", "India")),
    ("date", "on {}", _date),
    ("start_date", "starting {}", _date),
    ("end_date", "until {}", _date),
    ("year", "of {}", _number(1950, 2026)),
    ("time", "at {}", _one("9:30 AM", "14:00", "noon", "6 pm", "20:15", "midnight")),
    ("duration", "for {}", _number(5, 240, " minutes")),
    ("days", "for {} days", _number(1, 30)),
    ("limit", "but no more than {}", _number(1, 100)),
    ("page", "from page {}", _number(1, 20)),
    ("quantity", "{} times", _number(2, 50)),
    ("amount", "worth {} dollars", _number(10, 90000)),
    ("price", "below ${}", _number(5, 3000)),
    ("budget", "with a budget of {} euros", _number(50, 9000)),
    ("rate", "at a rate of {}", _decimal(0, 12)),
    ("percentage", "at {}%", _number(1, 100)),
    ("latitude", "at latitude {}", _decimal(-90, 90)),
    ("longitude", "and longitude {}", _decimal(-180, 180)),
    ("radius", "within a radius of {}", _number(1, 100, " km")),
    ("width", "with a width of {} meters", _number(1, 90)),
    ("height", "and {} meters high", _number(1, 90)),
    ("mass", "that weighs {} kg", _decimal(1, 100)),
    ("velocity", "moving at {} m/s", _number(1, 400)),
    ("temperature", "at {} degrees", _number(-20, 45)),
    ("values", "using the values {}", _list),
    ("unit", "in {}", _one("celsius", "fahrenheit", "kilometers", "miles", "kg", "pounds")),
    ("currency", "in {}", _one("USD", "EUR", "JPY", "GBP", "INR")),
    ("name", "for {}", _person),
    ("author", "by {}", _person),
    ("assignee", "assigned to {}", _person),
    ("email", "and notify {}", _email),
    ("phone", "under {}", _one("555-0134", "+1 202 555 0188", "0171 555 22", "555 0199")),
    ("user_id", "for user {}", _number(100, 99999)),
    ("account_id", "for account {}", _code),
    ("order_id", "with order number {}", _code),
    ("reference", "with reference '{}'", _code),
    ("id", "with ID {}", _number(1, 99999)),
    ("title", "titled '{}'", _words),
    ("description", "described as '{}'", _words),
    ("query", 'matching "{}"', _words),
    ("tag", "tagged {}", _one(*WORDS)),
    ("category", "in the category {}", _one("books", "electronics", "toys", "sports", "music")),
    ("genre", "of the genre {}", _one("jazz", "rock", "thriller", "comedy", "horror", "fantasy")),
    ("brand", "by the brand {}", _one("Acme", "Globex", "Umbra", "Northwind", "Vertex")),
    ("color", "in {}", _one("red", "dark blue", "black", "white", "olive")),
    ("size", "of size {}", _one("small", "medium", "large", "XL", "42")),
    ("status", "with status {}", _one("open", "closed", "pending", "active", "shipped", "failed")),
    ("priority", "with {} priority", _one("low", "normal", "high", "urgent")),
    ("type", "of type {}", _one("standard", "premium", "basic", "express", "hybrid", "annual")),
    ("mode", "in {} mode", _one("auto", "manual", "eco", "fast", "dark", "safe")),
    ("format", "as {}", _one("pdf", "csv", "json", "xml", "an image")),
    ("language", "in {}", _one("English", "Spanish", "French", "German", "Python", "Java")),
    ("sort_by", "sorted by {}", _one("date", "price", "name", "rating", "size")),
    ("order", "in {} order", _one("ascending", "descending")),
    ("url", "from {}", _url),
    ("file_path", "stored in {}", _path),
    ("team", "of {}", _one("Real Madrid", "the Lakers", "Manchester United", "the Yankees")),
    ("league", "in the {}", _one("Premier League", "NBA", "NFL", "Bundesliga")),
    ("gender", "for {}", _one("men", "women")),
    ("include_details", "with all details", _one("")),
    ("archived", "including archived ones", _one("")),
    ("dry_run", "without changing anything", _one("")),
)
"""(name, what a question says of it, its values)."""


def invent(count: int, seed: int) -> Iterator[Call]:
    """`count` calls, the right function of each among those it offers, no question twice; the same
    ones for the same seed."""
    draw = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        made = _invented(draw)
        if made.question not in seen:
            seen.add(made.question)
            yield made


def _invented(draw: random.Random) -> Call:
    verb, noun = draw.choice(VERBS), draw.choice(NOUNS)
    chosen = draw.sample(ARGUMENTS, draw.choices((1, 2, 3, 4, 5), (2, 4, 4, 2, 1))[0])
    said = [phrase.format(value(draw)) for _, phrase, value in chosen]
    wish = f"{verb} {draw.choice(('the', 'a', 'my'))} {noun} {' '.join(said)}"
    if draw.random() < 0.2:
        wish = f"{verb} the {noun} {', '.join(said)}"
    pattern = draw.choice(ASK)
    question = pattern.format(wish[0].upper() + wish[1:] if pattern.startswith("{}") else wish)
    extra = draw.sample(ARGUMENTS, draw.choices((0, 1, 2, 4), (6, 2, 2, 1))[0])
    arguments = list(dict.fromkeys(name for name, _, _ in [*chosen, *extra]))
    camel = draw.random() < 0.2
    right = (_name(draw, verb, noun, camel), _spelt(arguments, camel))
    functions = [right]
    if draw.random() < ALIKE:
        for _ in range(draw.randint(1, 3)):
            # Half of the others do something else with the same thing.
            other = noun if draw.random() < 0.5 else draw.choice(NOUNS)
            names = [name for name, _, _ in draw.sample(ARGUMENTS, draw.randint(1, 4))]
            functions.append((_name(draw, draw.choice(VERBS), other, camel), _spelt(names, camel)))
        draw.shuffle(functions)
    return Call("invented", question, tuple({**dict(functions), right[0]: right[1]}.items()))


def _name(draw: random.Random, verb: str, noun: str, camel: bool) -> str:
    """A function's name, in one of the spellings that are in use."""
    parts = [verb, *noun.split()]
    if camel:
        return _camel(parts)
    snake = "_".join(parts)
    thing = "_".join(noun.split())
    title = "".join(part.title() for part in parts)
    return draw.choice(
        (
            snake,
            snake,
            f"{thing}.{verb}",
            f"{thing}_{verb}",
            f"{draw.choice(NAMESPACES)}.{snake}",
            f"{draw.choice(NAMESPACES)}_{draw.randint(1, 4)}_{title}",
        )
    )


def _spelt(arguments: list[str], camel: bool) -> tuple[str, ...]:
    return tuple(_camel(name.split("_")) if camel else name for name in arguments)


def _camel(parts: list[str]) -> str:
    return parts[0] + "".join(part.title() for part in parts[1:])
