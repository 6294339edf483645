"""Our own functions, questions and solved examples for function calling."""

from __future__ import annotations

from typing import Any

EXAMPLES: list[tuple[str, str, dict[str, Any]]] = [
    ("find_bakery(city, opens_before)", "Which bakery in Porto opens before 7?",
     {"city": "Porto", "opens_before": 7}),
    ("ring_bell(times)", "Ring the bell four times, please.", {"times": 4}),
    ("paint_wall(room, colour)", "Paint the kitchen wall green.",
     {"room": "kitchen", "colour": "green"}),
    ("lend_book(title, member_id, days)", "Lend 'Dune' to member 318 for 14 days.",
     {"title": "Dune", "member_id": 318, "days": 14}),
    ("garden.water_plants(zone, minutes)", "Water the plants in zone B for 12 minutes.",
     {"zone": "B", "minutes": 12}),
    ("tide_table(harbour, date)", "When is high tide in Bergen on 3 May 2024?",
     {"harbour": "Bergen", "date": "2024-05-03"}),
    ("shift_plan(worker, weekday, night)", "Put Mira on the night shift on Tuesday.",
     {"worker": "Mira", "weekday": "Tuesday", "night": True}),
    ("sum_receipts(amounts, currency)", "Add up the receipts 12.5, 8 and 20 euros.",
     {"amounts": [12.5, 8, 20], "currency": "EUR"}),
    ("kennel.reserve(dog_name, nights)", "Reserve three nights for our dog Otto.",
     {"dog_name": "Otto", "nights": 3}),
    ("prism_volume(width, depth, height)", "What is the volume of a prism of 2 by 3 by 9?",
     {"width": 2, "depth": 3, "height": 9}),
    ("label_parcel(receiver, city, fragile)", "Label the fragile parcel for Ms. Lund in Oslo.",
     {"receiver": "Ms. Lund", "city": "Oslo", "fragile": True}),
    ("choir.next_rehearsal(voice)", "When do the altos rehearse next?", {"voice": "alto"}),
]  # fmt: skip
"""(signature, question, arguments): what a prompt shows as solved."""

QUESTIONS: dict[str, tuple[str, ...]] = {
    "trip_planner(country, days, budget)": (
        "Plan a trip of {a} days to {country} for at most {c}0 dollars.",
        "We have {c}0 euros and {b} days. What can we do in {country}?",
    ),
    "recipe_finder(ingredient, servings)": (
        "I'd like to cook something with {food} for {b} people.",
        "Find a recipe for {a} servings that uses {food}.",
    ),
    "unit_length(value, from_unit, to_unit)": (
        "How many miles are {c} kilometres?",
        "Convert {a} feet to metres.",
        "Express {c} inches in centimetres.",
    ),
    "remind_me(text, hour)": (
        "Remind me at {b} o'clock to {task}.",
        "Set a reminder about {matter} for {b}:00.",
    ),
    "note.create(title, body, tags)": (
        "Write down that {name} called about {matter}, and tag it as urgent.",
        "Make a note titled '{activity}' that says: ask {name} first.",
    ),
    "shop_search(item, max_price)": (
        "Show me {product} for less than {c} dollars.",
        "Is there {product} below {a} euros?",
    ),
    "library_lookup(topic, language, limit)": (
        "Find {b} books on {science} in English.",
        "Which {a} books do you have about {history}?",
    ),
    "loan_interest(principal, rate, years)": (
        "How much interest do I pay on {c}00 dollars at {b} percent over {a} years?",
        "Compute the interest for a loan of {c}000 euros, {b} years, 4.5 percent.",
    ),
    "hire_person(profession, city, hours)": (
        "I need {person} in Lyon for {b} hours.",
        "Book {person} for {a} hours in Toronto.",
    ),
    "triathlon.log(sport, distance_km, minutes)": (
        "I ran {b} kilometres in {c} minutes.",
        "Log a swim of {b} km that took me {a} minutes.",
    ),
    "event.schedule(title, date, guests)": (
        "Schedule {occasion} on 2024-06-{b:02d} for {a} guests.",
        "Put {occasion} with {a} people into the calendar for 2025-03-{b:02d}.",
    ),
    "plant_guide(plant, season)": (
        "How do I look after a sunflower in spring, next to {food}?",
        "What does {nature} need in winter?",
    ),
    "quiz_maker(topic, questions, level)": (
        "Make an easy quiz of {b} questions about {science}.",
        "I want {a} hard questions on {history}.",
    ),
    "send_postcard(recipient, message, country)": (
        "Send a postcard to {name} from {country} that says '{phrase}'.",
        "Write '{phrase}' to {name}, who lives in {country}.",
    ),
    "inventory.add(item, count, shelf)": (
        "Add {c} {items} to shelf {a}.",
        "Put {b} more {items} on shelf {a}.",
    ),
    "split_costs(total, people, tip_percent)": (
        "Split a bill of {c} dollars among {b} friends with a tip of 10 percent.",
        "We are {a} people, the total is {c} euros, and no tip.",
    ),
    "code_search(query, language)": (
        "Find {language} code that {program}.",
        "Search for a {language} snippet which {program}.",
    ),
    "dictionary.define(word, examples)": (
        "What does '{adjective}' mean? Give {b} examples.",
        "Define '{adjective}' with {a} example sentences.",
    ),
    "ticket.open(subject, priority, customer_id)": (
        "Open an urgent ticket for customer {c} about {mishap}.",
        "Customer {c} complains about {mishap}; low priority.",
    ),
    "playlist.build(mood, minutes)": (
        "Make a {adjective} playlist of {c} minutes.",
        "I want {a} minutes of music for {activity}.",
    ),
}
"""Questions for each signature; braces as in `chat_prompts`, c being a number of three digits."""
